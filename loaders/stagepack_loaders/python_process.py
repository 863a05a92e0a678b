"""How processes with the Python of this one are started."""

import os
import sys


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
