"""SIGTERM in commands that write: what is unfinished is removed before the process ends. SIGINT, which no code drops."""

import contextlib
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

# An interrupt that waits for the end of an import, or was dropped, looks again after so many seconds.
_POLL_SECONDS: Final = 0.02
# The function that imports a module, whose argument `name` is its name.
_IMPORT_CODE: Final = ("<frozen importlib._bootstrap>", "_find_and_load")


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


class _Interrupt(KeyboardInterrupt):
    """A `KeyboardInterrupt` that says when it was dropped: by C code, or by Python in a finalizer, a callback of a weak reference."""

    def __init__(self, was_dropped: Callable[[], None]) -> None:
        super().__init__()
        self._was_dropped = was_dropped

    def __del__(self) -> None:
        # The last frame that it has reached catches it, and runs then; one that it has left has ended.
        reached = None if self.__traceback__ is None else self.__traceback__.tb_frame
        frame = inspect.currentframe()
        while frame is not None and frame is not reached:
            frame = frame.f_back
        if frame is None:
            self._was_dropped()


@contextlib.contextmanager
def orderly_interrupt() -> Iterator[None]:
    """Let SIGINT raise `KeyboardInterrupt` in the ``with`` block, again where it is dropped; during the import of numpy, after it.

    Torch imports numpy in C++ code, which drops the exception: the command would go on, with a numpy that cannot be imported again.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    alarm, report_ignored, is_inside = contextlib.ExitStack(), sys.unraisablehook, True

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        if not _is_import_fragile(frame):
            alarm.close()
            raise _Interrupt(look_again)
        if signal_number == signal.SIGINT:
            look_again()

    def look_again() -> None:
        if is_inside and threading.current_thread() is threading.main_thread():
            alarm.close()
            alarm.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, interrupt))
            alarm.callback(signal.setitimer, signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_REAL, _POLL_SECONDS, _POLL_SECONDS)

    def report(ignored: Any) -> None:
        if not isinstance(ignored.exc_value, _Interrupt):
            report_ignored(ignored)

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = report
    try:
        yield
    finally:
        is_inside = False
        alarm.close()
        sys.unraisablehook = report_ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_import_fragile(frame: FrameType | None) -> bool:
    """Whether a frame, or one that called it, imports a module that an exception must not interrupt."""
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) == _IMPORT_CODE:
            module_name = frame.f_locals["name"]
            if module_name == "torch._C" or module_name.partition(".")[0] == "numpy":
                return True
        frame = frame.f_back
    return False
