"""An interrupt ends a command, whatever code it meets; see also `tests.cli.test_process`."""

import contextlib
import ctypes
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from stagepack.cli.termination import orderly_interrupt


def interrupt_this_process() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    wait()


def wait(seconds: float = 2) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.001)


class Finalized:
    def __del__(self) -> None:
        interrupt_this_process()


class Interrupting:
    @property
    def attribute(self) -> None:
        interrupt_this_process()

    def __iter__(self) -> Iterator[int]:
        yield 1
        interrupt_this_process()


def drop_in_finalizer() -> None:
    Finalized()


def drop_in_weak_reference() -> None:
    target = Interrupting()
    reference = weakref.ref(target, lambda _: interrupt_this_process())
    del target
    assert reference() is None


def drop_in_c_code() -> None:
    ctypes.pythonapi.PyObject_HasAttrString(ctypes.py_object(Interrupting()), b"attribute")


def drop_many_times() -> None:
    for _ in range(5):
        drop_in_finalizer()
        drop_in_c_code()


def run_command(drop: Callable[[], None]) -> None:
    with orderly_interrupt():
        drop()
        wait(20)


@pytest.mark.parametrize("drop", [drop_in_finalizer, drop_in_weak_reference, drop_in_c_code, drop_many_times])
def test_an_interrupt_that_is_dropped_comes_again(drop: Callable[[], None], capfd: pytest.CaptureFixture[str]) -> None:
    begin, hook = time.monotonic(), sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        run_command(drop)
    assert time.monotonic() - begin < 10
    assert sys.unraisablehook is hook
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_that_is_caught_comes_once() -> None:
    caught: list[type | None] = []

    def catch() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            interrupt_this_process()
        try:
            interrupt_this_process()
        except KeyboardInterrupt as error:
            caught.append(type(error).__mro__[1])
        try:
            interrupt_this_process()
        finally:
            caught.append(None)

    with orderly_interrupt():
        with contextlib.suppress(KeyboardInterrupt):
            catch()
        wait(0.2)
    assert caught == [KeyboardInterrupt, None]
