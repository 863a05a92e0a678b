"""A limit of the time that code of a user or of torch runs."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

# Code that catches every exception, as `except:` does, meets the next one after so many seconds.
_AGAIN_SECONDS: Final = 1.0


class TimeLimitReached(BaseException):
    """The time is over. No `Exception`, which code of a model may catch."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeLimitReached` in the ``with`` block when the time is over; an operator that runs then is finished first.

    Without effect outside of the main thread, which alone may handle signals.
    """
    if seconds <= 0:
        raise TimeLimitReached
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_running = True

    def stop(_: int, __: FrameType | None) -> None:
        if is_running:
            raise TimeLimitReached

    start_time = time.monotonic()
    known_handler = signal.signal(signal.SIGALRM, stop)
    known_delay, known_interval = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_SECONDS)
    try:
        yield
    finally:
        is_running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, known_handler)
        if known_delay:
            remaining = known_delay - (time.monotonic() - start_time)
            signal.setitimer(signal.ITIMER_REAL, max(remaining, 0.001), known_interval)
