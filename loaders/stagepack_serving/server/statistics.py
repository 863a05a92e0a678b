"""What the versions of models have done since they were loaded: Triton's statistics extension.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md
"""

import time
from dataclasses import dataclass, field
from typing import Any

from stagepack_serving.server.scheduler import CallBatch

_NANOSECONDS = 1e9


@dataclass(slots=True, eq=False)
class TotalDuration:
    """How often something was done, and how long it took together.

    Attributes:
        count: how often.
        seconds: how long together.
    """

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Add durations.

        seconds: how long something took.
        """
        self.count += count
        self.seconds += seconds * count

    def fields(self) -> dict[str, int]:
        """Return the fields of a ``StatisticDuration``."""
        return {"count": self.count, "ns": round(self.seconds * _NANOSECONDS)}


@dataclass(slots=True, eq=False)
class ComputeDurations:
    """The parts of the runs of a model.

    Attributes:
        compute_input: converting the inputs.
        compute_infer: running the stages.
        compute_output: converting the outputs.
    """

    compute_input: TotalDuration = field(default_factory=TotalDuration)
    compute_infer: TotalDuration = field(default_factory=TotalDuration)
    compute_output: TotalDuration = field(default_factory=TotalDuration)

    def add(self, batch: CallBatch, count: int) -> None:
        """Add a batch that has run."""
        self.compute_input.add(batch.begin_time - batch.start_time, count)
        self.compute_infer.add(batch.run_time - batch.begin_time, count)
        self.compute_output.add(batch.end_time - batch.run_time, count)

    def fields(self) -> dict[str, Any]:
        """Return the durations as fields of the protocol."""
        return {
            "compute_input": self.compute_input.fields(),
            "compute_infer": self.compute_infer.fields(),
            "compute_output": self.compute_output.fields(),
        }


class VersionStatistics:
    """What one version of a model has done. The event loop counts answers; the last lane of the model counts batches."""

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._last_inference = 0.0
        self._inference_count = 0
        self._execution_count = 0
        self._success = TotalDuration()
        self._fail = TotalDuration()
        self._queue = TotalDuration()
        self._computes = ComputeDurations()
        self._computes_by_batch_size: dict[int, ComputeDurations] = {}

    def count_answer(self, seconds: float, *, is_success: bool) -> None:
        """Count a request that was answered or refused.

        seconds: the time from its head to its answer.
        """
        (self._success if is_success else self._fail).add(seconds)

    def count_batch(self, batch: CallBatch) -> None:
        """Count a batch that has run."""
        self._last_inference = time.time()
        batch_size = sum(call.batch_size for call in batch.calls)
        self._inference_count += batch_size
        self._execution_count += 1
        for call in batch.calls:
            self._queue.add(batch.start_time - call.arrival)
        self._computes.add(batch, len(batch.calls))
        if batch_size <= self._max_batch_size:
            self._computes_by_batch_size.setdefault(batch_size, ComputeDurations()).add(batch, 1)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a ``ModelStatistics``, but for the name and the version."""
        no_duration = TotalDuration().fields()
        return {
            "last_inference": round(self._last_inference * 1e3),
            "inference_count": self._inference_count,
            "execution_count": self._execution_count,
            "inference_stats": {
                "success": self._success.fields(),
                "fail": self._fail.fields(),
                "queue": self._queue.fields(),
                **self._computes.fields(),
                "cache_hit": no_duration,
                "cache_miss": no_duration,
            },
            "batch_stats": [
                {"batch_size": batch_size, **computes.fields()}
                for batch_size, computes in sorted(self._computes_by_batch_size.copy().items())
            ],
        }
