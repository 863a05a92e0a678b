"""Work of the event loop in threads of its own."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from stagepack.format.threads import start_in_thread

Result = TypeVar("Result")


async def run_in_thread(function: Callable[[], Result]) -> Result:
    """Run a function in a thread of its own, which does not keep the process alive when the server stops."""
    return await asyncio.wrap_future(start_in_thread(function, "bundle"))
