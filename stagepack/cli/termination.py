"""SIGTERM in commands that write: what is unfinished is removed before the process ends."""

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from types import FrameType


class _Terminated(BaseException):
    """The process received SIGTERM."""


@contextlib.contextmanager
def orderly_termination() -> Iterator[None]:
    """Let SIGTERM end the ``with`` block as an interrupt from the keyboard does, and the process after it, by the same signal."""
    # Only the main thread may set handlers; a caller that has one of its own keeps it.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(_: int, __: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Terminated

    signal.signal(signal.SIGTERM, terminate)
    is_terminated = False
    try:
        yield
    except _Terminated as error:
        # Objects in these frames are cleaned up with their last reference, and the caller keeps the traceback until this one returns.
        traceback.clear_frames(error.__traceback__)
        is_terminated = True
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if is_terminated:
        os.kill(os.getpid(), signal.SIGTERM)
