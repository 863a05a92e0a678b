"""Work on large requests and answers in threads, so that the event loop answers others meanwhile."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Item = TypeVar("Item")

# Takes less than a millisecond on the event loop, and a thread would cost a tenth of it.
_SMALL_BYTES: Final = 65_536
# More threads would only wait for the interpreter.
_THREADS: Final = ThreadPoolExecutor(max_workers=2, thread_name_prefix="codec")
# Long enough for a thread that waits for the interpreter to get it.
_PAUSE_SECONDS: Final = 5e-5


async def beside_loop(
    byte_count: int, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Call a function, in a thread if it has much to do.

    byte_count: the size of what it reads or writes, in bytes.
    """
    if byte_count <= _SMALL_BYTES:
        return function(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: function(*args, **kwargs))


def with_pauses(items: Iterable[Item]) -> Iterator[Item]:
    """Let other threads have the interpreter between steps of work, each of which holds it."""
    for position, item in enumerate(items):
        if position:
            time.sleep(_PAUSE_SECONDS)
        yield item
