"""What a trace of a run says as plain data, which `load` prints and `report` draws."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stagepack_loaders.run_trace import RunTrace, Span

_SECOND = 1e9  # nanoseconds


def trace_facts(trace: "RunTrace") -> dict[str, Any]:
    """Return how long a traced run took, and what share of it each process computed, waited and transferred.

    `idle` is the share of the time of all processes with stages in which they computed nothing, which the pipeline bubble estimates.
    """
    start, end = window(trace.spans)
    seconds = (end - start) / _SECOND
    processes: list[dict[str, Any]] = [
        {
            "process": process,
            "name": process_name,
            **{
                f"{kind}_share": _busy_seconds(trace.spans, process, kind) / seconds if seconds else 0.0
                for kind in ("compute", "wait", "transfer")
            },
        }
        for process, process_name in sorted(trace.processes.items())
    ]
    compute_shares = [process["compute_share"] for process in processes if process["compute_share"]]
    return {
        "requests": len({span.request for span in trace.spans}),
        "seconds": seconds,
        "idle": 1 - sum(compute_shares) / len(compute_shares) if compute_shares else 0.0,
        "processes": processes,
        "spans": len(trace.spans),
        "dropped": trace.dropped,
    }


def window(spans: "Iterable[Span]") -> tuple[int, int]:
    """Return when the first span starts and when the last one ends; 0 and 0 without spans."""
    times = [(span.start, span.end) for span in spans]
    return min((start for start, _ in times), default=0), max((end for _, end in times), default=0)


def _busy_seconds(spans: "Iterable[Span]", process: int, kind: str) -> float:
    """How long at least one thread of a process was busy with a kind of work, in seconds."""
    covered, last_end = 0, 0
    for span in sorted(spans, key=lambda span: span.start):
        if span.process == process and span.kind == kind:
            covered += max(0, span.end - max(span.start, last_end))
            last_end = max(last_end, span.end)
    return covered / _SECOND
