"""How processes with the Python of this one are started, and which signals stop them."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def module_command(module_name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module.

    Without ``-P`` Python would look for modules in the current folder first: a bundle of a stranger, if it is that folder, may have a file
    ``torch.py``.
    """
    return [sys.executable, "-P", "-m", module_name, *arguments]


def module_environment() -> dict[str, str]:
    """Return the environment of this process, with the folders from which it imports."""
    # An empty name is the current folder, in which an interactive interpreter looks.
    return os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path)}


@contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Restore the handlers of `STOP_SIGNALS`, which a closed event loop would drop. Only the main thread may set handlers."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS} if is_main else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # else the handler is not one of Python
                signal.signal(number, handler)
