"""The section of the page that compares a traced run with the estimated pipeline. Lengths are in pixels, times in nanoseconds."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree.ElementTree import Element

from stagepack.cli.cost_facts import bubble_share
from stagepack.cli.output import count_of, format_time
from stagepack.cli.report.html_elements import data_table, html_element, number_cell, scrollable
from stagepack.cli.run_tracing import trace_facts, window

if TYPE_CHECKING:
    from stagepack_loaders.run_trace import RunTrace

# Of later requests there is no drawing: bars would be thinner than a pixel.
_DRAWN_REQUESTS = 32
_PICOSECONDS = 1000  # in a nanosecond
_WIDTH = 1140
_LABEL_HEIGHT, _BAR_HEIGHT, _STRIP_HEIGHT, _ROW_GAP = 18, 26, 5, 10
_AXIS_HEIGHT = 26
_LEAST_WIDTH = 0.5  # of a bar, so that a short one is seen
_DIGIT_WIDTH = 9
_REQUEST_COLORS = 4
_MOST_TICKS = 10
# Where a bar of each kind begins in the row of a process, and its height: strips are below the bars of compute.
_PLACES = {
    "compute": (0, _BAR_HEIGHT),
    "transfer": (_BAR_HEIGHT + 1, _STRIP_HEIGHT),
    "wait": (_BAR_HEIGHT + _STRIP_HEIGHT + 2, _STRIP_HEIGHT),
}


class _Bar(NamedTuple):
    """A time in which a process did one thing for a request; it starts so long after the begin of the drawing."""

    kind: str
    request: int
    title: str
    start: float
    duration: float


# The label of a process, with its busy share, and what it did.
_Row = tuple[str, Sequence[_Bar]]


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
    rows: list[_Row] = []
    for process in facts["processes"]:
        share = f": {process['compute_share']:.0%} computing" if process["compute_share"] else ""
        bars = [
            _Bar(
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
        rows.append((f"{process['name']}{share}", bars))
    return _drawing(rows, max(end - start, 1), "when each process computed, waited and transferred")


def _estimated_drawing(process_times: Mapping[int, float], drawn_requests: Sequence[int], trace: "RunTrace") -> Element:
    """The schedule in which each process takes the next request as soon as it is free and the request has come."""
    durations = {process: time / _PICOSECONDS for process, time in process_times.items()}
    bars: dict[int, list[_Bar]] = {process: [] for process in durations}
    free_times = dict.fromkeys(durations, 0.0)
    for request in drawn_requests:
        ready_time = 0.0
        for process, duration in durations.items():
            start = max(ready_time, free_times[process])
            ready_time = free_times[process] = start + duration
            title = f"compute, request {request}: {format_time(duration * _PICOSECONDS)}"
            bars[process].append(_Bar("compute", request, title, start, duration))
    end = max([1.0, *free_times.values()])
    rows: list[_Row] = []
    for process, process_bars in bars.items():
        share = sum(bar.duration for bar in process_bars) / end
        process_name = trace.processes.get(process, f"process {process}")
        rows.append((f"{process_name}: {share:.0%} computing", process_bars))
    return _drawing(rows, end, "the estimated schedule of the same requests")


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


def _drawing(rows: Sequence[_Row], duration: float, title: str) -> Element:
    """Return a drawing of rows over a common time."""
    has_strips = any(bar.kind != "compute" for _, bars in rows for bar in bars)
    row_height = _BAR_HEIGHT + (2 * _STRIP_HEIGHT + 2 if has_strips else 0)
    step = _LABEL_HEIGHT + row_height + _ROW_GAP
    scale = _WIDTH / duration
    elements = [*_axis(duration, len(rows) * step)]
    for row_number, (label, bars) in enumerate(rows):
        top = row_number * step + _LABEL_HEIGHT
        elements.append(html_element("text", label, x=0, y=top - 5))
        elements.append(html_element("rect", x=0, y=top, width=_WIDTH, height=row_height, class_="ground"))
        elements += [element for bar in bars for element in _bar(bar, top, scale)]
    height = len(rows) * step + _AXIS_HEIGHT
    return html_element("svg", elements, class_="timeline", role="img", aria_label=title, width=_WIDTH, height=height)


def _bar(bar: _Bar, row_top: float, scale: float) -> Iterator[Element]:
    left, width = bar.start * scale, max(bar.duration * scale, _LEAST_WIDTH)
    offset, height = _PLACES[bar.kind]
    is_compute = bar.kind == "compute"
    yield html_element(
        "rect",
        html_element("title", bar.title),
        x=round(left, 2),
        y=row_top + offset,
        width=round(width, 2),
        height=height,
        class_=f"request{bar.request % _REQUEST_COLORS}" if is_compute else bar.kind,
    )
    label = str(bar.request)
    if is_compute and width > _DIGIT_WIDTH * (len(label) + 1):
        middle = round(left + width / 2, 2)
        yield html_element("text", label, x=middle, y=row_top + 17, text_anchor="middle", class_="request")


def _axis(duration: float, top: float) -> Iterator[Element]:
    """Lines at round times, with labels below."""
    step = _tick_step(duration)
    for tick in range(int(duration / step) + 1):
        left = round(tick * step / duration * _WIDTH, 2)
        yield html_element("line", x1=left, x2=left, y1=0, y2=top + 4, class_="tick")
        anchor = "start" if tick == 0 else "middle" if left < _WIDTH - 24 else "end"
        label = "0" if tick == 0 else format_time(tick * step * _PICOSECONDS)
        yield html_element("text", label, x=left, y=top + 18, text_anchor=anchor, class_="soft")


def _tick_step(duration: float) -> float:
    """A round time, so that there are at most ten ticks."""
    least_step = duration / _MOST_TICKS
    magnitude = 10.0 ** math.floor(math.log10(least_step))
    return next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= least_step)
