"""A trace of processes: each tells what it did for each request, and the front puts it together."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from stagepack.cli.run_tracing import trace_facts
from stagepack.errors import InputError, OptionError, StageLostError
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed import group_trace
from stagepack_loaders.run_trace import RunTrace, write_trace
from stagepack_loaders.spans import Span, SpanRecorder, trace_clock
from tests.distributed.bundles import in_processes, process_ids
from tests.hostile.attack import run

IDS = torch.arange(6)
# The difference of the clocks of two processes of a host: both count from one moment, which each has read once.
CLOCK_NANOSECONDS = 200_000


def spans_of(trace: RunTrace, kind: str) -> dict[tuple[int, int | None], list[Span]]:
    """The spans of a kind by request and stage."""
    found: dict[tuple[int, int | None], list[Span]] = {}
    for span in trace.spans:
        if span.kind == kind:
            found.setdefault((span.request, span.stage), []).append(span)
    return found


def test_every_request_is_traced_in_every_stage(layers: Bundle) -> None:
    with in_processes(layers) as pipeline:
        pipeline(IDS)
        start = trace_clock()
        with pipeline.trace() as run_trace:
            answers = [pipeline.submit(IDS) for _ in range(20)]
            for answer in answers:
                answer.result()
        end = trace_clock()
        pipeline(IDS)
        assert [name.partition(" on ")[0] for name in run_trace.processes.values()] == [
            f"process {rank}" for rank in range(4)
        ]
        expected = ["the caller", "stage 0", "stage 1", "stage 2"]
        assert [name.partition(", ")[2] for name in run_trace.processes.values()] == expected
    computed = spans_of(run_trace, "compute")
    requests = sorted({request for request, _ in computed})
    assert requests == list(range(requests[0], requests[0] + 20))
    assert computed.keys() == {(request, stage) for request in requests for stage in range(3)}
    for (request, stage), (span,) in computed.items():
        assert stage is not None
        assert span.process == stage + 1
        assert start - CLOCK_NANOSECONDS <= span.start <= span.end <= end + CLOCK_NANOSECONDS
        if stage:  # the values come from the stage before
            (before,) = computed[request, stage - 1]
            assert before.end <= span.start + CLOCK_NANOSECONDS
    # Each process waits for each request and receives its values; the front sends all and waits for all.
    assert {(request, stage) for request, stage in spans_of(run_trace, "wait")} >= computed.keys()
    assert {request for request, stage in spans_of(run_trace, "transfer") if stage is None} == set(requests)
    assert any(span.bytes for span in run_trace.spans if span.kind == "transfer")
    assert not run_trace.dropped


def test_spans_of_a_thread_are_one_after_another(layers: Bundle, tmp_path: Path) -> None:
    with in_processes(layers, processes=2) as pipeline, pipeline.trace() as run_trace:
        for answer in [pipeline.submit(IDS) for _ in range(10)]:
            answer.result()
    write_trace(run_trace, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    rows = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"]]
    assert len(rows) == len(set(rows)) * 2  # one row in each process of stages: nothing overlaps
    facts = trace_facts(run_trace)
    assert facts["requests"] == 10
    for process in facts["processes"]:
        assert 0 <= process["compute_share"] + process["wait_share"] + process["transfer_share"] <= 2.001
    assert facts["processes"][0]["compute_share"] == 0 < facts["idle"] < 1


def test_times_agree_with_those_that_the_stages_count(layers: Bundle) -> None:
    with in_processes(layers) as pipeline:
        with pipeline.trace() as run_trace:
            for _ in range(30):
                pipeline(IDS)
        # Heartbeats tell the front what the stages have counted.
        while sum(counts.runs for status in pipeline.statuses().values() for counts in status.stages) < 3 * 31:
            time.sleep(0.05)
        statuses = pipeline.statuses().values()
        counted = {counts.stage: counts.busy_seconds for status in statuses for counts in status.stages}
    assert counted.keys() == {0, 1, 2}
    for stage, busy_seconds in counted.items():
        traced = sum(span.duration for span in run_trace.spans if (span.kind, span.stage) == ("compute", stage)) / 1e9
        assert traced <= busy_seconds * 1.1  # the example has run before the trace


def test_traces_follow_one_another(layers: Bundle) -> None:
    with in_processes(layers) as pipeline:
        for count in (3, 0, 2):
            with pipeline.trace() as run_trace:
                with pytest.raises(OptionError, match="traced already"), pipeline.trace():
                    pass
                for _ in range(count):
                    pipeline(IDS)
            assert len({span.request for span in run_trace.spans}) == count


def test_a_long_trace_comes_in_several_reports(layers: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = SpanRecorder()
    recorder.start()
    for request in range(10):
        recorder.add("wait", request, trace_clock())
    monkeypatch.setattr(group_trace, "_SPANS_PER_REPORT", 4)
    reports = list(group_trace.report_spans(recorder))
    assert [(len(report.spans), report.is_last) for report in reports] == [(4, False), (4, False), (2, True)]
    assert [report.is_last for report in group_trace.report_spans(recorder)] == [True]
    monkeypatch.undo()
    with in_processes(layers) as pipeline, pipeline.trace() as run_trace:
        for answer in [pipeline.submit(IDS) for _ in range(800)]:
            answer.result()
    assert len(spans_of(run_trace, "compute")) == 2400  # 4800 spans of each process


def test_a_request_that_fails_is_traced_up_to_its_failure(layers: Bundle) -> None:
    with in_processes(layers) as pipeline:
        with pytest.raises(InputError), pipeline.trace() as run_trace:
            pipeline(IDS + 100)
        assert [span.stage for span in run_trace.spans if span.kind == "compute"] == [0]
        with pipeline.trace() as run_trace:
            pipeline(IDS)
        assert len(spans_of(run_trace, "compute")) == 3


def test_a_process_that_is_lost_ends_the_trace(layers: Bundle) -> None:
    with in_processes(layers) as pipeline:
        traced = pipeline.trace()
        run_trace = traced.__enter__()
        pipeline(IDS)
        os.kill(process_ids(pipeline)[2], signal.SIGKILL)
        start_time = time.monotonic()
        with pytest.raises(StageLostError):
            traced.__exit__(None, None, None)
        assert time.monotonic() - start_time < 5
        assert not run_trace.spans
        with pytest.raises(StageLostError), pipeline.trace():
            pass


@pytest.mark.slow  # 10 s: its processes begin without torch
def test_load_traces_processes(layers: Bundle, tmp_path: Path) -> None:
    trace_file = tmp_path / "trace.json"
    result = run("load", str(layers.path), "--processes", "3", "--trace", str(trace_file), "--requests", "6", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)["trace"]
    assert facts["requests"] == 6
    assert [process["compute_share"] > 0 for process in facts["processes"]] == [False, True, True, True]
    page = tmp_path / "page.html"
    assert run("report", str(layers.path), "-o", str(page), "--trace", str(trace_file)).exit_code == 0
    assert "6 requests in " in page.read_text()
