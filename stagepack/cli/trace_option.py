"""The options that trace a run, and the run of several requests that is traced."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagepack.cli.output import count_of, print_line, progress
from stagepack.cli.path_options import PathType
from stagepack.cli.trace_facts import trace_facts
from stagepack.errors import StageLostError

if TYPE_CHECKING:
    from stagepack_loaders.callable_pipeline import CallablePipeline

_MOST_REQUESTS = 10_000
_DEFAULT_REQUESTS = 8


def trace_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options `--trace` and `--requests`, passed as `trace_file` and `request_count`."""
    trace_option = click.option(
        "--trace",
        "trace_file",
        type=PathType(Path),
        metavar="FILE",
        show_default="not written",
        help="After the first answer, run the inputs again, and write to FILE when each process computed, waited and transferred for each "
        "request: a trace that https://ui.perfetto.dev shows, and 'stagepack report --trace'.",
    )
    count_option = click.option(
        "--requests",
        "request_count",
        type=click.IntRange(1, _MOST_REQUESTS),
        metavar="N",
        default=_DEFAULT_REQUESTS,
        show_default=True,
        help="With --trace: how often the inputs are run; with several processes, at the same time.",
    )
    return trace_option(count_option(function))


def trace_requests(
    pipeline: "CallablePipeline", inputs: Mapping[str, Any], request_count: int, trace_file: Path, *, at_once: int
) -> dict[str, Any]:
    """Run a pipeline several times on the same inputs, and write a trace of it.

    at_once: how many calls are in flight at most.
    """
    from stagepack_loaders import example  # noqa: PLC0415 - after the arguments are checked
    from stagepack_loaders.trace_file import write_trace  # noqa: PLC0415 - the same

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
    from stagepack_loaders.trace_file import write_trace  # noqa: PLC0415 - after the arguments are checked

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
    """Print for people what was traced; `facts` are those of `trace_facts`."""
    requests = count_of("request", facts["requests"])
    computing = [process for process in facts["processes"] if process["compute_share"]]
    busy = "; ".join(f"{process['name']}: {process['compute_share']:.0%}" for process in computing)
    print_line(f"traced {requests} in {facts['seconds']:.3f} s: wrote {facts['file']}")
    print_line(f"computing: {busy}; without work {facts['idle']:.0%} of the time")
