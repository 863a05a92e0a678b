"""What the versions of models have done since they were loaded: Triton's statistics extension.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md
"""

import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stagepack_serving.server.scheduler import CallBatch

# The parts of a run: converting the inputs, running the stages, and converting the outputs.
_COMPUTE_PARTS: Final = ("compute_input", "compute_infer", "compute_output")
_REQUEST_PARTS: Final = ("success", "fail", "queue", *_COMPUTE_PARTS, "cache_hit", "cache_miss")


class _Durations:
    """How often each part was done, and how many seconds it took together."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, part: str, seconds: float, count: int = 1) -> None:
        self._counts[part] += count
        self._seconds[part] += seconds * count

    def add_run(self, batch: "CallBatch", count: int) -> None:
        times = (batch.start_time, batch.begin_time, batch.run_time, batch.end_time)
        for part, start, end in zip(_COMPUTE_PARTS, times, times[1:], strict=False):
            self.add(part, end - start, count)

    def fields(self, parts: tuple[str, ...]) -> dict[str, dict[str, int]]:
        """The fields of a ``StatisticDuration`` for each part."""
        return {part: {"count": self._counts[part], "ns": round(self._seconds[part] * 1e9)} for part in parts}


class VersionStatistics:
    """What one version of a model has done. The event loop counts answers; the last lane of the model counts batches."""

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._last_inference = 0.0
        self._inference_count = 0
        self._execution_count = 0
        self._durations = _Durations()
        self._durations_by_batch_size: defaultdict[int, _Durations] = defaultdict(_Durations)

    def count_answer(self, seconds: float, *, is_success: bool) -> None:
        """Count a request that was answered or refused so many seconds after its head."""
        self._durations.add("success" if is_success else "fail", seconds)

    def count_batch(self, batch: "CallBatch") -> None:
        """Count a batch that has run."""
        self._last_inference = time.time()
        batch_size = sum(call.batch_size for call in batch.calls)
        self._inference_count += batch_size
        self._execution_count += 1
        for call in batch.calls:
            self._durations.add("queue", batch.start_time - call.arrival)
        self._durations.add_run(batch, len(batch.calls))
        if batch_size <= self._max_batch_size:
            self._durations_by_batch_size[batch_size].add_run(batch, 1)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a ``ModelStatistics``, but for the name and the version."""
        return {
            "last_inference": round(self._last_inference * 1e3),
            "inference_count": self._inference_count,
            "execution_count": self._execution_count,
            "inference_stats": self._durations.fields(_REQUEST_PARTS),
            "batch_stats": [
                {"batch_size": batch_size, **durations.fields(_COMPUTE_PARTS)}
                for batch_size, durations in sorted(self._durations_by_batch_size.copy().items())
            ],
        }
