"""Traces of runs: which spans there are, and the file that Perfetto shows."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import InputError, WriteError
from stagepack_loaders.run_trace import RunTrace, read_trace, write_trace
from stagepack_loaders.spans import ConsecutiveSpans, Span, SpanRecorder, trace_clock
from tests.hostile.tiny import write_tiny

IDS = torch.arange(6).reshape(2, 3)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle in three stages. Do not write into it."""
    return write_tiny(tmp_path_factory.mktemp("sound") / "tiny.stagepack")


def span(start: int, duration: int, *, thread: str = "stages", process: int = 0) -> Span:
    return Span(
        kind="compute", process=process, thread=thread, request=1, stage=process, start=start, duration=duration
    )


def file_events(path: Path, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_bytes())["traceEvents"] if event["ph"] == phase]


def event(**changes: Any) -> bytes:
    """A trace file with one event."""
    fields = {"ph": "X", "pid": 0, "tid": 1, "ts": 0.0, "dur": 1.0, "name": "", "cat": "compute", "args": {}} | changes
    return json.dumps({"traceEvents": [fields]}).encode()


def test_a_traced_pipeline_records_each_stage_of_each_request(sound: Path) -> None:
    pipeline = stagepack.load(sound)
    pipeline(IDS)
    with pipeline.trace() as run_trace:
        start = trace_clock()
        for _ in range(4):
            pipeline(IDS)
        seconds = (trace_clock() - start) / 1e9
    pipeline(IDS)
    compute = [span for span in run_trace.spans if span.kind == "compute"]
    requests = sorted({span.request for span in compute})
    assert requests == [2, 3, 4, 5]  # the call before the trace was number 1
    assert [(span.request, span.stage) for span in compute] == [
        (request, stage) for request in requests for stage in range(3)
    ]
    # Spans of one thread that follow one another: none ends after the next starts, and together they fit into the time of the calls.
    ends = [0, *(span.end for span in run_trace.spans)]
    assert all(span.start >= end for span, end in zip(run_trace.spans, ends, strict=False))
    assert 0 < sum(span.duration for span in run_trace.spans) / 1e9 <= seconds
    assert not run_trace.dropped


def test_a_trace_ends_with_an_error(sound: Path) -> None:
    pipeline = stagepack.load(sound)
    with pytest.raises(InputError), pipeline.trace() as run_trace:
        pipeline(IDS + 100)
    assert run_trace.spans[-1].kind == "compute"
    assert not pipeline.executor.spans.is_on


def test_a_recorder_that_is_off_costs_next_to_nothing() -> None:
    recorder = SpanRecorder()
    count = 20_000
    start = time.perf_counter()
    for _ in range(count):
        with recorder.span("compute", 1, 0):
            pass
    assert (time.perf_counter() - start) / count < 5e-6  # 0.2 µs; a machine may be busy
    recorder.start()
    assert recorder.stop() == []


def test_a_recorder_keeps_so_many_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagepack_loaders.spans._MOST_SPANS", 3)
    recorder = SpanRecorder(process=2)
    recorder.start()
    for request in range(5):
        recorder.add("wait", request, trace_clock(), stage=1)
    assert recorder.dropped == 2
    assert [(span.process, span.request, span.stage) for span in recorder.stop()] == [(2, 0, 1), (2, 1, 1), (2, 2, 1)]


def test_clocks_of_threads_compare() -> None:
    recorder = SpanRecorder()
    recorder.start()
    with recorder.span("wait", 1):
        thread = threading.Thread(target=lambda: recorder.add("transfer", 1, trace_clock(), byte_count=8), name="inner")
        thread.start()
        thread.join()
    inner, outer = recorder.stop()
    assert (inner.thread, inner.bytes) == ("inner", 8)
    assert outer.start <= inner.start <= inner.end <= outer.end
    assert abs(outer.start - time.time_ns()) < 60e9


def test_consecutive_spans_begin_where_the_last_one_ended() -> None:
    recorder = SpanRecorder(process=1)
    spans = ConsecutiveSpans(recorder)
    spans.end("wait", 1)
    recorder.start()
    spans.end("wait", 2, stage=0)
    spans.end("compute", 2, stage=0)
    between = trace_clock()
    spans.begin()
    spans.end("transfer", 3, byte_count=8)
    wait, compute, transfer = recorder.stop()
    expected = ("wait", 2, "compute", "transfer", 8)
    assert (wait.kind, wait.request, compute.kind, transfer.kind, transfer.bytes) == expected
    assert wait.end == compute.start
    assert compute.end <= between <= transfer.start


def test_a_trace_file_is_read_back(sound: Path, tmp_path: Path) -> None:
    pipeline = stagepack.load(sound)
    with pipeline.trace() as run_trace:
        pipeline(IDS)
    write_trace(run_trace, tmp_path / "trace.json")
    again = read_trace(tmp_path / "trace.json")
    assert again.processes == {0: "process 0"}
    assert again.bundle == stagepack.open(sound).digest
    first_start = run_trace.spans[0].start
    shifted = [
        (span.kind, span.request, span.stage, span.start - first_start, span.duration) for span in run_trace.spans
    ]
    assert [(span.kind, span.request, span.stage, span.start, span.duration) for span in again.spans] == shifted
    assert {span.thread for span in again.spans} == {threading.current_thread().name}


def test_the_file_has_a_row_for_each_thread_of_each_process(tmp_path: Path) -> None:
    spans = [span(100, 50), span(110, 10, thread="results"), span(200, 50), span(100, 100, process=1)]
    write_trace(RunTrace(bundle="", processes={0: "process 0", 1: "process 1"}, spans=spans), tmp_path / "trace.json")
    rows = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in file_events(tmp_path / "trace.json", "M")
        if event["name"] == "thread_name"
    }
    expected = [(0, "results"), (0, "stages"), (1, "stages")]
    assert sorted((process, row_name) for (process, _), row_name in rows.items()) == expected
    placed = [
        (event["pid"], rows[event["pid"], event["tid"]], event["ts"], event["dur"])
        for event in file_events(tmp_path / "trace.json", "X")
    ]
    placements = [
        (0, "results", 0.01, 0.01),
        (0, "stages", 0.0, 0.05),
        (0, "stages", 0.1, 0.05),
        (1, "stages", 0.0, 0.1),
    ]
    assert sorted(placed) == placements


def test_events_of_a_row_nest(tmp_path: Path) -> None:
    # 0-100 holds 10-20; 50-150 overlaps it, and gets a row of its own, where 120-130 would fit too: it goes where it nests first.
    spans = [span(0, 100), span(10, 10), span(50, 100), span(120, 10)]
    write_trace(RunTrace(bundle="", processes={0: "process 0"}, spans=spans), tmp_path / "trace.json")
    by_row: dict[int, list[tuple[float, float]]] = {}
    for event in file_events(tmp_path / "trace.json", "X"):
        by_row.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_row) == 2
    for intervals in by_row.values():
        for start, end in intervals:
            for other_start, other_end in intervals:
                assert end <= other_start or other_end <= start or (start - other_start) * (end - other_end) <= 0


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"{}",
        b"[]",
        b'{"traceEvents": 3}',
        b"\xff",
        b'{"traceEvents": [{}]}',
        event(ts=-1),
        event(ts=1e300),
        event(args={"stage": "x"}),
        event(cat="sleep"),
        event(args={"request": -1}),
    ],
)
def test_a_file_that_is_no_trace_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"trace\.json: (expected a trace|the trace cannot be read)"):
        read_trace(path)


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="cannot be written"):
        write_trace(RunTrace(bundle="", processes={}), tmp_path)
