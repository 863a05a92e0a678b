"""Waits for a condition, in the place of a time that is enough on an idle machine."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition, which must hold in time: on a busy machine, too."""
    end_time = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_time, "the condition did not hold in time"
        time.sleep(0.02)
