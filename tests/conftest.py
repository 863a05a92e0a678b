"""How the processes of the tests run: several at once, on few cores."""

import gc
import os

# In one thread each, as more would wait for each other. Read when torch is imported; server processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what was imported, which stays: a tenth of the time."""
    gc.freeze()
