"""The section of the HTML page that compares a traced run with the estimated pipeline."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element

from stagepack.cli.cut_facts import bubble_share
from stagepack.cli.output import count_of
from stagepack.cli.quantities import format_time
from stagepack.cli.report.html_element import html_element
from stagepack.cli.report.sections import data_table, number_cell, scrollable
from stagepack.cli.report.timeline_drawing import Bar, Row, timeline_drawing
from stagepack.cli.trace_facts import trace_facts, window

if TYPE_CHECKING:
    from stagepack_loaders.run_trace import RunTrace

# Of later requests there is no drawing: bars would be thinner than a pixel.
_DRAWN_REQUESTS = 32
_PICOSECONDS = 1000  # in a nanosecond


def timeline_section(trace: "RunTrace", stage_times: Sequence[float]) -> Element:
    """Return the timeline of a traced run, that of the estimate for as many requests, and the idle shares of both.

    stage_times: the time of each stage in picoseconds, estimated or measured by `stagepack profile`.
    """
    facts = trace_facts(trace)
    process_times = _process_times(trace, stage_times)
    request_count = facts["requests"]
    estimated_idle = bubble_share(list(process_times.values()), request_count)
    drawn_requests = sorted({span.request for span in trace.spans})[:_DRAWN_REQUESTS]
    suffix = f", the first {len(drawn_requests)} drawn" if len(drawn_requests) < request_count else ""
    summary = (
        f"{count_of('request', request_count)} in {format_time(facts['seconds'] * 1e12)}{suffix}. "
        "A bar is a stage at work, its color and number tell the request; the strips below are transfers, in red, and waiting, in gray."
    )
    return html_element(
        "div",
        html_element("p", summary),
        html_element("p", html_element("strong", "Measured")),
        scrollable(_measured_drawing(trace, drawn_requests, facts)),
        html_element(
            "p", html_element("strong", "Estimated"), " for the same requests, without waiting for anything else:"
        ),
        scrollable(_estimated_drawing(process_times, drawn_requests, trace)),
        _idle_table(facts, estimated_idle),
    )


def _process_times(trace: "RunTrace", stage_times: Sequence[float]) -> dict[int, float]:
    """The time of the stages of each process, in picoseconds. Processes without stages have no time."""
    processes = {span.stage: span.process for span in trace.spans if span.kind == "compute" and span.stage is not None}
    times: defaultdict[int, float] = defaultdict(float)
    for stage_number, process in sorted(processes.items(), key=lambda entry: entry[0]):
        times[process] += stage_times[stage_number]
    return dict(times)


def _measured_drawing(trace: "RunTrace", drawn_requests: Sequence[int], facts: Mapping[str, Any]) -> Element:
    drawn = set(drawn_requests)
    spans = [span for span in trace.spans if span.request in drawn]
    start, end = window(spans)
    rows = []
    for process in facts["processes"]:
        bars = [
            Bar(
                kind=span.kind,
                request=span.request,
                title=f"{span.kind}, request {span.request}, {'the caller' if span.stage is None else f'stage {span.stage}'}: "
                f"{format_time(span.duration * _PICOSECONDS)}",
                start=span.start - start,
                duration=span.duration,
            )
            for span in sorted(spans, key=lambda span: (span.start, -span.duration))
            if span.process == process["process"]
        ]
        share = f": {process['compute_share']:.0%} computing" if process["compute_share"] else ""
        rows.append(Row(label=f"{process['name']}{share}", bars=bars))
    return timeline_drawing(rows, max(end - start, 1), "when each process computed, waited and transferred")


def _estimated_drawing(process_times: Mapping[int, float], drawn_requests: Sequence[int], trace: "RunTrace") -> Element:
    """The schedule in which each process takes the next request as soon as it is free and the request has come."""
    durations = {process: time / _PICOSECONDS for process, time in process_times.items()}
    bars: dict[int, list[Bar]] = {process: [] for process in durations}
    free_times = dict.fromkeys(durations, 0.0)
    for request in drawn_requests:
        ready_time = 0.0
        for process, duration in durations.items():
            start = max(ready_time, free_times[process])
            ready_time = free_times[process] = start + duration
            title = f"compute, request {request}: {format_time(duration * _PICOSECONDS)}"
            bars[process].append(Bar(kind="compute", request=request, title=title, start=start, duration=duration))
    end = max(free_times.values(), default=0.0)
    rows = [
        Row(
            label=f"{trace.processes.get(process, f'process {process}')}: "
            f"{sum(bar.duration for bar in process_bars) / max(end, 1):.0%} computing",
            bars=process_bars,
        )
        for process, process_bars in bars.items()
    ]
    return timeline_drawing(rows, max(end, 1), "the estimated schedule of the same requests")


def _idle_table(facts: Mapping[str, Any], estimated_idle: float) -> Element:
    rows = [
        [
            html_element("td", process["name"]),
            *(number_cell(f"{process[f'{kind}_share']:.1%}") for kind in ("compute", "transfer", "wait")),
        ]
        for process in facts["processes"]
    ]
    table = data_table(["process", "#computing", "#transferring", "#waiting"], rows)
    table.set("class", "narrow")
    return html_element(
        "div",
        html_element(
            "p",
            "Share of the time that processes computed nothing: measured ",
            html_element("strong", f"{facts['idle']:.1%}"),
            f", estimated for {count_of('request', facts['requests'])} ",
            html_element("strong", f"{estimated_idle:.1%}"),
            ".",
        ),
        table,
    )
