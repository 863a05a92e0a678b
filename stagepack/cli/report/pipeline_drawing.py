"""The drawing of a pipeline as SVG: the input, the stages and the result, from top to bottom. Lengths are in pixels.

Values for the next box are an arrow down to it. All other values run on lanes right of the boxes: one lane for each box that sends such
values, with a branch to each receiver, and one for the values that other boxes than the last stage return. Each branch has a row of its
own beside its box, and nets that share a lane have no box in common, so lines only cross. No layout library draws this: a pipeline has an
order already.
"""

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

from stagepack.cli.output import format_bytes, format_time
from stagepack.cli.report.html_elements import html_element
from stagepack.cli.stage_diagram import Arrow, arrows

_LEFT, _TOP = 2, 2
_BOX_WIDTH, _BOX_HEIGHT = 320, 52  # the least height: beside a box are the rows of its branches
_GAP = 34  # between two boxes
_ARROW_LEFT = 36  # of the arrows between boxes
_ROW_HEIGHT = 18  # of a branch with its label
_LABEL_WIDTH = 64  # of the longest number of bytes
_LANE_STEP = 12
_MODULE_CHARACTERS, _VALUE_CHARACTERS = 34, 40  # that fit into a box, and beside an arrow


class _Branch(NamedTuple):
    """The values between the root of a net and another box."""

    box: int
    title: str
    byte_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Net:
    """A lane: one sender with branches to its receivers, or one receiver with branches from its senders.

    Attributes:
        root: the number of the box where all values come from or go to. The input has the number 0.
        branches: the other ends, from top to bottom.
        collects: whether the root is the receiver.
        kind: the CSS class: ``skip`` between stages, ``ends`` from the input or to the result.
    """

    root: int
    branches: Sequence[_Branch]
    collects: bool
    kind: str

    @property
    def boxes(self) -> list[int]:
        """Its boxes, from top to bottom."""
        return sorted([self.root, *(branch.box for branch in self.branches)])

    def receives(self, box: int) -> bool:
        """Whether its line at a box points to the box."""
        return (box == self.root) == self.collects


def _connections(all_arrows: Iterator[Arrow], box_count: int) -> tuple[list[_Branch], list[_Net]]:
    """Return the values for each next box, as branches to it, and the nets of all others."""
    boxes = {"input": 0, "result": box_count - 1} | {f"stage{stage}": stage + 1 for stage in range(box_count - 2)}
    steps: list[_Branch] = []
    sent: dict[int, list[_Branch]] = {}
    returned: list[_Branch] = []
    for arrow in all_arrows:
        source, target = boxes[arrow.source], boxes[arrow.target]
        ends = f"{arrow.source} to {arrow.target}".replace("stage", "stage ")
        title = f"{ends}: {arrow.label}, {format_bytes(arrow.byte_count)}"
        if target == source + 1:
            steps.append(_Branch(target, f"{format_bytes(arrow.byte_count)}: {arrow.label}", arrow.byte_count))
        elif target == box_count - 1:
            returned.append(_Branch(source, title, arrow.byte_count))
        else:
            sent.setdefault(source, []).append(_Branch(target, title, arrow.byte_count))
    nets = [
        _Net(root=source, branches=sorted(branches), collects=False, kind="skip" if source else "ends")
        for source, branches in sorted(sent.items())
    ]
    if returned:
        nets.append(_Net(root=box_count - 1, branches=sorted(returned), collects=True, kind="ends"))
    return steps, nets


def packed_lanes(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return the lane of each span, so that the spans of one lane are disjoint; short spans have the first lanes."""
    # The lanes that are taken at each position, as the bits of an integer.
    taken = [0] * (max((end for _, end in spans), default=0) + 1)
    lanes = [0] * len(spans)
    for index, (start, end) in sorted(enumerate(spans), key=lambda entry: entry[1][1] - entry[1][0]):
        taken_lanes = functools.reduce(operator.or_, taken[start : end + 1])
        lane_bit = ~taken_lanes & (taken_lanes + 1)  # the lowest lane that is free
        taken[start : end + 1] = [bits | lane_bit for bits in taken[start : end + 1]]
        lanes[index] = lane_bit.bit_length() - 1
    return lanes


def pipeline_drawing(cut_facts: Mapping[str, Any]) -> Element:
    """Return the drawing of the pipeline of a cut."""
    stages, edges = cut_facts["stages"], cut_facts["edges"]
    box_count = len(stages) + 2
    steps, nets = _connections(arrows(cut_facts), box_count)
    lanes = packed_lanes([(net.boxes[0], net.boxes[-1]) for net in nets])
    rows = _rows(nets, lanes, box_count)
    heights = [max(_BOX_HEIGHT, _ROW_HEIGHT * len(rows_of_box) + 6) for rows_of_box in rows]
    tops = [_TOP]
    for height in heights:
        tops.append(tops[-1] + height + _GAP)
    row_levels = {
        (net_index, box): tops[box] + _ROW_HEIGHT * position
        for box, net_indices in enumerate(rows)
        for position, net_index in enumerate(net_indices, start=1)
    }
    slowest = max((stage["picoseconds"] for stage in stages), default=0) or 1
    width = _LEFT + _BOX_WIDTH + _LABEL_WIDTH + _LANE_STEP * (max(lanes, default=-1) + 2)
    return html_element(
        "svg",
        [_step(step, tops[step.box]) for step in steps],
        _end_box("input", [edge["name"] for edge in edges if edge["producer"] is None], tops[0], heights[0]),
        [_stage_box(stage, tops[box], heights[box], slowest) for box, stage in enumerate(stages, start=1)],
        _end_box("result", [edge["name"] for edge in edges if edge["result"]], tops[-2], heights[-1]),
        [
            _net_element(net, lane, [row_levels[index, box] for box in net.boxes])
            for index, (net, lane) in enumerate(zip(nets, lanes, strict=True))
        ],
        class_="pipeline",
        role="img",
        aria_label="the stages and the values that cross between them",
        width=width,
        height=tops[-1] - _GAP + _TOP,
    )


def _rows(nets: Sequence[_Net], lanes: Sequence[int], box_count: int) -> list[list[int]]:
    """For each box the nets beside it, by number, from top to bottom: in such an order that lines cross as little as possible."""
    from_above: list[list[int]] = [[] for _ in range(box_count)]
    to_below: list[list[int]] = [[] for _ in range(box_count)]
    for index in sorted(range(len(nets)), key=lambda index: lanes[index]):
        *others, last = nets[index].boxes
        from_above[last].append(index)
        for box in others:
            to_below[box].insert(0, index)
    return [above + below for above, below in zip(from_above, to_below, strict=True)]


def _net_element(net: _Net, lane: int, levels: Sequence[int]) -> Element:
    """A net: its lane, and a line between it and each box, with an arrow head at receivers and the bytes of each branch."""
    right = _LEFT + _BOX_WIDTH
    lane_x = right + _LABEL_WIDTH + _LANE_STEP * (lane + 1)
    byte_counts = {branch.box: branch.byte_count for branch in net.branches}
    path = f"M{lane_x} {levels[0]}V{levels[-1]}" + "".join(f"M{right} {level}H{lane_x}" for level in levels)
    marks: list[Element] = []
    for box, level in zip(net.boxes, levels, strict=True):
        if net.receives(box):
            marks.append(_head(f"{right},{level} {right + 8},{level - 4} {right + 8},{level + 4}"))
        if level not in (levels[0], levels[-1]):  # a branch, where other lines cross
            marks.append(html_element("circle", cx=lane_x, cy=level, r=2.5, class_="head"))
        if box in byte_counts:
            label = format_bytes(byte_counts[box])
            marks.append(html_element("text", label, x=right + 10, y=level - 4, class_="label"))
    title = html_element("title", "\n".join(branch.title for branch in net.branches))
    return html_element("g", title, html_element("path", d=path, class_="line"), marks, class_=f"net {net.kind}")


def _step(step: _Branch, target_top: int) -> Element:
    """The arrow to the next box, and the names and the bytes of its values."""
    x = _LEFT + _ARROW_LEFT
    label = html_element(
        "text", shortened(step.title, _VALUE_CHARACTERS), x=x + 12, y=target_top - _GAP / 2 + 4, class_="label"
    )
    head = _head(f"{x},{target_top} {x - 4},{target_top - 8} {x + 4},{target_top - 8}")
    line = html_element("path", d=f"M{x} {target_top - _GAP}V{target_top}", class_="line")
    return html_element("g", html_element("title", step.title), line, head, label, class_="net")


def _head(points: str) -> Element:
    return html_element("polygon", points=points, class_="head")


def _stage_box(stage: Mapping[str, Any], top: int, height: int, slowest: int) -> Element:
    module = stage["starts_at"] or "the model"
    costs = f"{format_bytes(stage['weight_bytes'])}, {format_time(stage['picoseconds'])}"
    name = f"stage {stage['stage']}"
    bar_width = _BOX_WIDTH - 20
    bar_place = {"x": _LEFT + 10, "y": top + 41, "height": 4}
    return html_element(
        "g",
        html_element("title", f"{name}: starts at {module}, {costs}"),
        html_element("rect", x=_LEFT, y=top, width=_BOX_WIDTH, height=height, rx=6, class_="box"),
        html_element("text", name, x=_LEFT + 10, y=top + 18, class_="name"),
        html_element(
            "text",
            shortened_path(module, _MODULE_CHARACTERS),
            x=_LEFT + 20 + 8 * len(name),
            y=top + 18,
            class_="module",
        ),
        html_element("text", costs, x=_LEFT + 10, y=top + 34, class_="label"),
        html_element("rect", width=bar_width, **bar_place, class_="track"),
        html_element("rect", width=round(bar_width * stage["picoseconds"] / slowest, 1), **bar_place, class_="time"),
    )


def _end_box(name: str, value_names: Sequence[str], top: int, height: int) -> Element:
    """The input or the result."""
    names = ", ".join(value_names)
    return html_element(
        "g",
        html_element("title", f"{name}: {names}"),
        html_element("rect", x=_LEFT, y=top, width=_BOX_WIDTH, height=height, rx=20, class_="end"),
        html_element("text", name, x=_LEFT + 16, y=top + 22, class_="name"),
        html_element("text", shortened(names, _VALUE_CHARACTERS), x=_LEFT + 16, y=top + 38, class_="module"),
    )


def shortened_path(path: str, character_count: int) -> str:
    """Return the path of a module in so many characters: its end, with its last number, which tells the layer."""
    if len(path) <= character_count:
        return path
    names = path.split(".")
    layer = max((index for index, name in enumerate(names) if name.isdigit()), default=0)
    if layer == 0:
        return f"…{path[1 - character_count :]}"
    # More names than characters do not fit.
    for first in range(max(1, len(names) - character_count), layer + 1):
        end = ".".join(names[first:])
        if len(end) < character_count:
            return f"…{end}"
    return f"…{shortened('.'.join(names[layer:]), character_count - 1)}"


def shortened(text: str, character_count: int) -> str:
    """Return a text in so many characters: its start."""
    return text if len(text) <= character_count else f"{text[: character_count - 1]}…"
