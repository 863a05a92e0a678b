"""Elapsed time by phase."""

import time


class PhaseTimer:
    """Measures how long consecutive phases take.

    Attributes:
        seconds: duration of each phase in seconds, in the order in which they ended.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase_start = time.perf_counter()

    def end(self, phase: str) -> None:
        """End the current phase under this name, and start the next one."""
        now = time.perf_counter()
        self.seconds[phase] = round(now - self._phase_start, 6)
        self._phase_start = now

    def reassign(self, source: str, target: str, seconds: float) -> None:
        """Count `seconds` of phase `source` as phase `target`; 0 seconds create no phase."""
        if seconds:
            self.seconds[source] = round(self.seconds[source] - seconds, 6)
            self.seconds[target] = round(self.seconds.get(target, 0.0) + seconds, 6)
