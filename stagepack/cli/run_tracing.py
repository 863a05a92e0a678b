"""The trace of a run: its options, the run that is traced, and what the trace says as plain data and for people."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagepack.cli.output import count_of, print_line, progress
from stagepack.errors import StageLostError

if TYPE_CHECKING:
    from stagepack_loaders.pipeline import CallablePipeline
    from stagepack_loaders.run_trace import RunTrace
    from stagepack_loaders.spans import Span

_SECOND = 1e9  # nanoseconds


def trace_facts(trace: "RunTrace") -> dict[str, Any]:
    """Return how long a traced run took, and what share of it each process computed, waited and transferred.

    `idle` is the share of the time of all processes with stages in which they computed nothing, which the pipeline bubble estimates.
    """
    start, end = _window(trace.spans)
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


def _window(spans: "Iterable[Span]") -> tuple[int, int]:
    """When the first span starts and when the last one ends; 0 and 0 without spans."""
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


def trace_requests(
    pipeline: "CallablePipeline", inputs: Mapping[str, Any], request_count: int, trace_file: Path, *, at_once: int
) -> dict[str, Any]:
    """Run a pipeline several times on the same inputs, and write a trace of it.

    at_once: how many calls are in flight at most.
    """
    from stagepack_loaders import example  # noqa: PLC0415 - after the arguments are checked
    from stagepack_loaders.run_trace import write_trace  # noqa: PLC0415 - the same

    def run_request(_: int) -> None:
        # A copy, since a model may write into its inputs.
        example.run_on_inputs(pipeline, {edge_name: pipeline.arrays.copy(array) for edge_name, array in inputs.items()})

    with progress("tracing"), pipeline.trace() as run_trace:
        if at_once == 1:
            for request in range(request_count):
                run_request(request)
        else:
            with ThreadPoolExecutor(min(at_once, request_count), thread_name_prefix="caller") as executor:
                list(executor.map(run_request, range(request_count)))
    write_trace(run_trace, trace_file)
    return {"file": str(trace_file)} | trace_facts(run_trace)


def trace_until_closed(pipeline: "CallablePipeline", trace_file: Path, closing: ExitStack, *, quiet: bool) -> None:
    """Trace a pipeline from now on, and write the trace when `closing` is closed, or say why there is none."""
    from stagepack_loaders.run_trace import write_trace  # noqa: PLC0415 - after the arguments are checked

    traced = ExitStack()
    run_trace = traced.enter_context(pipeline.trace())

    def finish() -> None:
        try:
            traced.close()
        except StageLostError as error:
            click.echo(f"{trace_file}: not written: {error}", err=True)
            return
        write_trace(run_trace, trace_file)
        if not quiet:
            print_trace({"file": str(trace_file)} | trace_facts(run_trace))

    closing.callback(finish)


def print_trace(facts: Mapping[str, Any]) -> None:
    """Print for people what was traced; `trace_facts` returns `facts`."""
    requests = count_of("request", facts["requests"])
    computing = [process for process in facts["processes"] if process["compute_share"]]
    busy = "; ".join(f"{process['name']}: {process['compute_share']:.0%}" for process in computing)
    print_line(f"traced {requests} in {facts['seconds']:.3f} s: wrote {facts['file']}")
    print_line(f"computing: {busy}; without work {facts['idle']:.0%} of the time")
