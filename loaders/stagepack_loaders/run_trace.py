"""Traces of runs, and their files in the Trace Event Format, which https://ui.perfetto.dev and ``chrome://tracing`` show.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. A process is a row, a thread a row inside it.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from stagepack.errors import InputError
from stagepack.format.output_file import output_file
from stagepack.format.rules import JSON_ERRORS
from stagepack_loaders.spans import Span, SpanKind

_NANOSECONDS = 1000  # in a microsecond, the unit of the format
# Numbers of a file that are larger were not written here; they would overflow.
_Microseconds = Annotated[float, Meta(ge=0, le=1e15)]
_Count = Annotated[int, Meta(ge=0, le=2**53)]


@dataclass(slots=True, kw_only=True)
class RunTrace:
    """The spans of all processes of a pipeline.

    Attributes:
        bundle: the digest of the bundle that ran.
        processes: how each process is named, by rank.
        spans: the spans; they are there when the trace is over.
        dropped: how many spans are missing, since a process keeps only so many.
    """

    bundle: str
    processes: Mapping[int, str]
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0


def write_trace(trace: RunTrace, path: str | os.PathLike[str]) -> None:
    """Write a trace as a file. A file of that name is replaced.

    Args:
        trace: the trace.
        path: the file.

    Raises:
        WriteError: the file cannot be written.
    """
    content = {
        "traceEvents": list(_events(trace)),
        "displayTimeUnit": "ms",
        "otherData": {"bundle": trace.bundle, "dropped": trace.dropped},
    }
    with output_file(path) as new_file:
        new_file.write_bytes(msgspec.json.encode(content))


def read_trace(path: str | os.PathLike[str]) -> RunTrace:
    """Read a trace that `write_trace` wrote. Times count from the first span."""
    try:
        content = msgspec.json.decode(Path(path).read_bytes(), type=_TraceFile)
    except OSError as error:
        raise InputError(f"{path}: the trace cannot be read: {error.strerror}") from None
    except JSON_ERRORS as error:
        raise InputError(f"{path}: expected a trace, as written by 'stagepack load --trace': {error}") from None
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for event in content.events:
        if event.phase == "M" and event.name == "process_name":
            processes[event.process] = event.args.name
        elif event.phase == "M" and event.name == "thread_name":
            threads[event.process, event.thread] = event.args.name
    spans = [_span(event, threads) for event in content.events if event.phase == "X"]
    return RunTrace(bundle=content.about.bundle, processes=processes, spans=spans, dropped=content.about.dropped)


class _Arguments(Struct, frozen=True, kw_only=True):
    """The request, the stage and the bytes of a span, or a name."""

    name: str = ""
    request: _Count = 0
    stage: _Count | None = None
    bytes: _Count = 0


class _Event(
    Struct, frozen=True, kw_only=True, rename={"phase": "ph", "process": "pid", "thread": "tid", "kind": "cat"}
):
    """An event of the file. Spans have the phase X, names of processes and threads the phase M."""

    phase: str
    name: str
    process: _Count
    thread: _Count = 0
    kind: SpanKind | None = None
    ts: _Microseconds = 0.0
    dur: _Microseconds = 0.0
    args: _Arguments = _Arguments()


class _About(Struct, frozen=True, kw_only=True):
    bundle: str = ""
    dropped: _Count = 0


class _TraceFile(Struct, frozen=True, kw_only=True):
    events: list[_Event] = msgspec.field(name="traceEvents")
    about: _About = msgspec.field(name="otherData", default=_About())


def _events(trace: RunTrace) -> Iterator[dict[str, Any]]:
    for process, process_name in trace.processes.items():
        yield _named("process_name", process, 0, name=process_name)
        yield _named("process_sort_index", process, 0, sort_index=process)
    first_start = min((span.start for span in trace.spans), default=0)
    rows: dict[tuple[int, str], list[list[int]]] = {}
    row_numbers: dict[tuple[int, str, int], int] = {}
    for span in sorted(trace.spans, key=lambda span: (span.start, -span.duration)):
        row = _free_row(rows.setdefault((span.process, span.thread), []), span)
        key = (span.process, span.thread, row)
        if key not in row_numbers:
            row_numbers[key] = len(row_numbers) + 1
            row_name = span.thread if row == 0 else f"{span.thread} {row + 1}"
            yield _named("thread_name", span.process, row_numbers[key], name=row_name)
        yield {
            "ph": "X",
            "pid": span.process,
            "tid": row_numbers[key],
            "ts": (span.start - first_start) / _NANOSECONDS,
            "dur": span.duration / _NANOSECONDS,
            "name": _title(span),
            "cat": span.kind,
            "args": {"request": span.request, "stage": span.stage, "bytes": span.bytes},
        }


def _named(event_name: str, process: int, thread: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": event_name, "pid": process, "tid": thread, "args": args}


def _title(span: Span) -> str:
    place = "" if span.stage is None else f" stage {span.stage}"
    return f"{span.kind}{place} request {span.request}"


def _free_row(rows: list[list[int]], span: Span) -> int:
    """The first row in which a span follows all spans, or is inside one: events of a row must nest. Starts ascend."""
    for row, open_ends in enumerate(rows):
        while open_ends and open_ends[-1] <= span.start:
            open_ends.pop()
        if not open_ends or open_ends[-1] >= span.end:
            open_ends.append(span.end)
            return row
    rows.append([span.end])
    return len(rows) - 1


def _span(event: _Event, threads: dict[tuple[int, int], str]) -> Span:
    return Span(
        kind=event.kind or "compute",
        process=event.process,
        thread=threads.get((event.process, event.thread), ""),
        request=event.args.request,
        stage=event.args.stage,
        start=round(event.ts * _NANOSECONDS),
        duration=round(event.dur * _NANOSECONDS),
        bytes=event.args.bytes,
    )
