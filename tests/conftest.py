"""How the processes of the tests run: several at once, on few cores."""

import gc
import os

# In one thread each, as more would wait for each other. Read when torch is imported; server processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# No test depends on what an earlier one has verified, or leaves a record in the home folder.
os.environ["STAGEPACK_VERIFIED_FILES"] = ""


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what was imported, which stays: a tenth of the time."""
    gc.freeze()
