"""What an update of a pipeline has done, and how long its parts took."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

UpdatePart = Literal["fetch", "verify", "stage", "switch"]


@dataclass(slots=True, kw_only=True)
class UpdateReport:
    """What an update has done, with the time of each part in seconds.

    Attributes:
        version: the name of the version that runs now.
        previous: the name of the version before.
        fetch: downloads.
        verify: reading and comparing weight files with their digests.
        stage: making the new stages beside those that run.
        switch: the moment in which the pipeline has taken the new version.
        pause: how long a call has waited for the update at most. A call without a sequence that writes buffers waits while the buffers
            pass on to the new version; no other call waits.
    """

    version: str = ""
    previous: str = ""
    fetch: float = 0.0
    verify: float = 0.0
    stage: float = 0.0
    switch: float = 0.0
    pause: float = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """The time of each part."""
        return {
            "fetch": self.fetch,
            "verify": self.verify,
            "stage": self.stage,
            "switch": self.switch,
            "pause": self.pause,
        }

    @contextlib.contextmanager
    def part(self, name: UpdatePart) -> Iterator[None]:
        """Return a context whose time is added to that of a part."""
        start_time = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start_time)
