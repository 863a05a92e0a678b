"""The drawing of a pipeline as SVG, once for each width of a screen.

- Where the drawing of a pipeline has its boxes, lines and labels. Lengths are in pixels. The input, the stages and the result are cells
  of a grid that is read like text: from left to right, then the next row. A value for the next cell is an arrow to it. All other values
  run on lanes above the rows, one lane for each cell that sends such values, with a branch to each receiver; the values that cells other
  than the last stage return share one lane. No routine of a graph layout library draws this: a pipeline has an order already, and its
  rows have to fit to the width of a page.
- The values of a pipeline, by what draws them: an arrow to the next cell, or a lane.
"""

# Long because the layout of the drawing and what is drawn at each place are decided together.

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from xml.etree.ElementTree import Element

from stagepack.cli.output import format_bytes, format_time
from stagepack.cli.report.charts import html_element
from stagepack.cli.stage_diagram import Arrow, arrows

# Of the title of a net, which each line of its lane repeats.
_MOST_TITLE_CHARACTERS = 4_000
BOX_WIDTH, BOX_HEIGHT = 116, 66
_GAP = 62  # between two boxes of a row: as wide as the longest number of bytes
_LABEL_HEAD = 14  # between the boxes and the lowest lane
_LANE_STEP = 18  # between two lanes: the height of a label
_MARGIN_STEP = 9  # between two lanes in the right margin
_LEFT, _RIGHT = 22, 24  # margins, of which the arrow to the next row needs a part
_TURN = 12  # of the arrow to the next row: distance from the boxes on both sides
_WRAP_HEIGHT = 30  # below a row: the arrow to the next row, and its label
_TOP, _BOTTOM = 8, 8
_PORTS_LEFT, _PORTS_RIGHT = 8, 54  # where lines from and to lanes meet the top of a box
LABEL_SIZE = 11
_LABEL_CHARACTER = 6.6  # widest mean width of a character of a label
# The style sheet shows one of them. Their rows have at most so many boxes.
_MOST_COLUMNS = {"narrow": 2, "medium": 4, "wide": 7}
_LARGEST_SCALE = 1.25  # of a drawing that is smaller than the page
_NAME_CHARACTERS, _END_CHARACTERS = 16, 15  # that fit into the box of a stage, and of the input
_BAR_LEFT, _BAR_HEIGHT = 8, 4
_BUTTONS = {"in": "Zoom in", "out": "Zoom out", "whole": "Whole picture", "full": "Full screen"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """What leaves or joins a lane at one cell."""

    cell: int
    title: str
    byte_count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Net:
    """A lane: one sender with branches to its receivers, or one receiver with branches from its senders.

    Nets are keys of dicts by their identity: to compare all their branches takes long.

    Attributes:
        root: the cell with one line, where all values come from or go to.
        branches: the other ends, in the order of their cells.
        collects: whether the root is the receiver.
        kind: as for `Line`.
        cells: the cells of its ends, in order.
        title: names and bytes of its values, of so many branches as fit into a title.
    """

    root: int
    branches: tuple[Branch, ...]
    collects: bool
    kind: str
    cells: tuple[int, ...] = field(init=False)
    title: str = field(init=False)

    def __post_init__(self) -> None:
        cells = sorted([self.root, *(branch.cell for branch in self.branches)])
        object.__setattr__(self, "cells", tuple(cells))
        object.__setattr__(self, "title", _joined_titles([branch.title for branch in self.branches]))

    def receives(self, cell: int) -> bool:
        """Whether the line at one of its cells points to the cell."""
        return (cell == self.root) == self.collects

    def cells_by_row(self, columns: int) -> dict[int, list[int]]:
        """Return its cells in each row that has one, in order."""
        cells_of_row: dict[int, list[int]] = {}
        for cell in self.cells:
            cells_of_row.setdefault(cell // columns, []).append(cell)
        return cells_of_row


class Step(NamedTuple):
    """The values from a cell to the next one."""

    cell: int
    title: str
    byte_count: int


def connections(all_arrows: Iterator[Arrow], cell_count: int) -> tuple[list[Step], list[Net]]:
    """Return the values for the next cell, and the nets of all others."""
    cells = {"input": 0, "result": cell_count - 1} | {f"stage{index}": index + 1 for index in range(cell_count - 2)}
    steps: list[Step] = []
    sent: dict[int, list[Branch]] = {}
    returned: list[Branch] = []
    for arrow in all_arrows:
        source, target = cells[arrow.source], cells[arrow.target]
        title = (
            f"{_cell_name(arrow.source)} to {_cell_name(arrow.target)}: {arrow.label}, {format_bytes(arrow.byte_count)}"
        )
        if target == source + 1:
            steps.append(Step(source, title, arrow.byte_count))
        elif target == cell_count - 1:
            returned.append(Branch(cell=source, title=title, byte_count=arrow.byte_count))
        else:
            sent.setdefault(source, []).append(Branch(cell=target, title=title, byte_count=arrow.byte_count))
    nets = [
        Net(root=source, branches=_ordered(branches), collects=False, kind="skip" if source else "ends")
        for source, branches in sorted(sent.items())
    ]
    if returned:
        nets.append(Net(root=cell_count - 1, branches=_ordered(returned), collects=True, kind="ends"))
    return steps, nets


def _joined_titles(titles: Sequence[str]) -> str:
    """The titles as lines; of many, the first ones and how many more there are."""
    line_ends = itertools.accumulate(len(title) + 1 for title in titles)
    line_count = max(1, sum(line_end <= _MOST_TITLE_CHARACTERS for line_end in line_ends))
    remainder = [f"and {len(titles) - line_count} more"] if line_count < len(titles) else []
    return "\n".join([*titles[:line_count], *remainder])


def _ordered(branches: Sequence[Branch]) -> tuple[Branch, ...]:
    return tuple(sorted(branches, key=lambda branch: branch.cell))


def _cell_name(name: str) -> str:
    return name.replace("stage", "stage ")


def packed_lanes(spans: Mapping[Net, tuple[int, int]]) -> dict[Net, int]:
    """Return a lane for each net, so that the spans of one lane are disjoint; short spans first."""
    # The lanes that are taken at each position, as the bits of an integer.
    taken = [0] * (max((end for _, end in spans.values()), default=0) + 1)
    packed: dict[Net, int] = {}
    for net, (start, end) in sorted(spans.items(), key=lambda entry: entry[1][1] - entry[1][0]):
        taken_lanes = functools.reduce(operator.or_, taken[start : end + 1])
        lane_bit = ~taken_lanes & (taken_lanes + 1)  # the lowest lane that is free
        taken[start : end + 1] = [lanes | lane_bit for lanes in taken[start : end + 1]]
        packed[net] = lane_bit.bit_length() - 1
    return packed


class Point(NamedTuple):
    """A position in the drawing."""

    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A number of bytes.

    Attributes:
        text: the number with its unit.
        left: its left end, at the largest width that it can have.
        baseline: its baseline.
        kind: what it belongs to, as for `Line`.
        anchor: which part of it is at its place: ``start``, ``middle`` or ``end``.
    """

    text: str
    left: float
    baseline: float
    kind: str
    anchor: Literal["start", "middle", "end"]

    @property
    def x(self) -> float:
        """The position of its anchor."""
        return round(self.left + self.width * {"start": 0, "middle": 0.5, "end": 1}[self.anchor], 1)

    @property
    def width(self) -> float:
        """Upper limit of its width."""
        return label_width(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Segments at right angles.

    Attributes:
        points: its corners.
        kind: ``edge`` to the next cell, ``skip`` between other stages, or ``ends`` from the input or to the result.
        title: the names and bytes of the values.
        has_head: whether an arrow head is at its end.
        has_dot: whether it starts on another line.
    """

    points: tuple[Point, ...]
    kind: str
    title: str
    has_head: bool = True
    has_dot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayout:
    """The geometry of a drawing.

    Attributes:
        width: its width.
        height: its height.
        boxes: the left upper corner of each cell: the input, the stages, the result.
        lines: all lines.
        labels: all labels.
    """

    width: float
    height: float
    boxes: tuple[Point, ...]
    lines: tuple[Line, ...]
    labels: tuple[Label, ...]


def label_width(text: str) -> float:
    """Return an upper limit of the width of a label."""
    return _LABEL_CHARACTER * len(text)


def column_counts(stage_count: int, most_columns: int) -> int:
    """Return the number of columns, at most `most_columns`, that fills the rows evenly."""
    cell_count = stage_count + 2
    row_count = -(-cell_count // most_columns)
    return -(-cell_count // row_count)


def pipeline_layout(cut_facts: Mapping[str, Any], columns: int) -> PipelineLayout:
    """Return the geometry of the pipeline of a cut.

    columns: the number of cells in a row, at least 2.
    """
    return _Router(cut_facts, columns).layout()


class _Router:
    """Finds the ways of the lines of one drawing."""

    def __init__(self, cut_facts: Mapping[str, Any], columns: int) -> None:
        self._columns = columns
        self._cell_count = len(cut_facts["stages"]) + 2
        self._row_count = -(-self._cell_count // columns)
        self._steps, self._nets = connections(arrows(cut_facts), self._cell_count)
        # The cells of each net by row.
        self._net_rows = {net: net.cells_by_row(columns) for net in self._nets}
        self._row_lanes = self._channel_lanes()
        self._margin_lanes = packed_lanes(
            {net: (self._row(net.cells[0]), self._row(net.cells[-1])) for net in self._nets if self._crosses_rows(net)}
        )
        self._row_tops = self._tops()
        self._ports = self._port_positions()

    def layout(self) -> PipelineLayout:
        """Return the geometry."""
        lines: list[Line] = []
        labels: list[Label] = []
        for net in self._nets:
            lines += self._net_lines(net)
            labels += self._net_labels(net)
        for step in self._steps:
            line, label = self._step(step)
            lines.append(line)
            labels.append(label)
        margin_lane_count = max(self._margin_lanes.values(), default=-1) + 1
        return PipelineLayout(
            width=self._right_edge + _RIGHT + _MARGIN_STEP * margin_lane_count,
            height=self._row_tops[-1] + BOX_HEIGHT + _BOTTOM,
            boxes=tuple(self._corner(cell) for cell in range(self._cell_count)),
            lines=tuple(lines),
            labels=tuple(labels),
        )

    def _row(self, cell: int) -> int:
        return cell // self._columns

    def _crosses_rows(self, net: Net) -> bool:
        return len(self._net_rows[net]) > 1

    def _corner(self, cell: int) -> Point:
        row, column = divmod(cell, self._columns)
        return Point(_LEFT + column * (BOX_WIDTH + _GAP), self._row_tops[row])

    @property
    def _right_edge(self) -> float:
        return _LEFT + self._columns * (BOX_WIDTH + _GAP) - _GAP

    def _channel_lanes(self) -> list[dict[Net, int]]:
        """For each row, the lane of each net that has a cell there, counted upwards from the boxes.

        A net occupies its lane between columns. Of a column, the left half is for lines to the box and the right half for a label.
        """
        spans: list[dict[Net, tuple[int, int]]] = [{} for _ in range(self._row_count)]
        for net, cells_of_row in self._net_rows.items():
            for row, cells in cells_of_row.items():
                last_column = self._columns if self._crosses_rows(net) else cells[-1] % self._columns
                spans[row][net] = (2 * (cells[0] % self._columns), 2 * last_column)
        return [packed_lanes(row_spans) for row_spans in spans]

    def _tops(self) -> list[float]:
        """The top of the boxes of each row."""
        tops: list[float] = []
        level: float = _TOP
        for lanes in self._row_lanes:
            lane_count = max(lanes.values(), default=-1) + 1
            level += _LANE_STEP * lane_count + (_LABEL_HEAD if lane_count else 0)
            tops.append(level)
            level += BOX_HEIGHT + _WRAP_HEIGHT
        return tops

    def _lane_level(self, net: Net, row: int) -> float:
        return self._row_tops[row] - _LABEL_HEAD - _LANE_STEP * self._row_lanes[row][net]

    def _margin_level(self, net: Net) -> float:
        return self._right_edge + _RIGHT + _MARGIN_STEP * self._margin_lanes[net] - 2

    def _port_positions(self) -> dict[tuple[Net, int], float]:
        """Where the line of each net meets each of its cells: in such an order that lines cross as little as possible."""
        nets_from_left: list[list[Net]] = [[] for _ in range(self._cell_count)]
        nets_to_right: list[list[Net]] = [[] for _ in range(self._cell_count)]
        for net in self._nets:
            for cell in net.cells:
                is_last = cell == net.cells[-1] and not self._crosses_rows(net)
                (nets_from_left if is_last else nets_to_right)[cell].append(net)
        ports: dict[tuple[Net, int], float] = {}
        for cell, (from_left, to_right) in enumerate(zip(nets_from_left, nets_to_right, strict=True)):
            lanes = self._row_lanes[self._row(cell)]
            nets = sorted(from_left, key=lambda net: lanes[net]) + sorted(to_right, key=lambda net: -lanes[net])
            step = (_PORTS_RIGHT - _PORTS_LEFT) / (len(nets) + 1)
            left = self._corner(cell).x + _PORTS_LEFT
            ports |= {(net, cell): round(left + step * index, 1) for index, net in enumerate(nets, start=1)}
        return ports

    def _net_lines(self, net: Net) -> Iterator[Line]:
        """Yield the trunk of a net, through all rows where it has cells, and the line between it and each cell."""
        rows = list(self._net_rows[net])
        crosses_rows = self._crosses_rows(net)
        trunks: dict[int, tuple[float, float]] = {}  # the left and the right end in each row
        for row, cells in self._net_rows[net].items():
            ports = [self._ports[net, cell] for cell in cells]
            level = self._lane_level(net, row)
            left, right = trunks[row] = min(ports), self._margin_level(net) if crosses_rows else max(ports)
            if right > left:
                points = (Point(left, level), Point(right, level))
                yield Line(points=points, kind=net.kind, title=net.title, has_head=False)
        if crosses_rows:
            x = self._margin_level(net)
            points = (Point(x, self._lane_level(net, rows[0])), Point(x, self._lane_level(net, rows[-1])))
            yield Line(points=points, kind=net.kind, title=net.title, has_head=False)
        titles = {branch.cell: branch.title for branch in net.branches} | {net.root: net.title}
        for cell in net.cells:
            port, row = self._ports[net, cell], self._row(cell)
            on_lane, at_box = Point(port, self._lane_level(net, row)), Point(port, self._row_tops[row])
            left, right = trunks[row]
            is_inside = left < port < right
            if net.receives(cell):
                yield Line(points=(on_lane, at_box), kind=net.kind, title=titles[cell], has_dot=is_inside)
            else:
                yield Line(
                    points=(on_lane, at_box), kind=net.kind, title=titles[cell], has_head=False, has_dot=is_inside
                )

    def _net_labels(self, net: Net) -> Iterator[Label]:
        """Yield the bytes of each branch: left of it where its values come from the left, otherwise right of it."""
        for branch in net.branches:
            row, text = self._row(branch.cell), format_bytes(branch.byte_count)
            comes_from_left = not net.collects and self._row(net.root) == row
            corner = self._corner(branch.cell)
            left = corner.x - 4 - label_width(text) if comes_from_left else corner.x + _PORTS_RIGHT + 2
            yield Label(
                text=text,
                left=left,
                baseline=self._lane_level(net, row) - 4,
                kind=net.kind,
                anchor="end" if comes_from_left else "start",
            )

    def _step(self, arrow: Step) -> tuple[Line, Label]:
        """Return the arrow from a cell to the next one, and its label."""
        start, end = self._corner(arrow.cell), self._corner(arrow.cell + 1)
        text = format_bytes(arrow.byte_count)
        middle = BOX_HEIGHT / 2
        points: tuple[Point, ...]
        if start.y == end.y:
            points = (Point(start.x + BOX_WIDTH, start.y + middle), Point(end.x, end.y + middle))
            left, baseline = start.x + BOX_WIDTH + (_GAP - label_width(text)) / 2, start.y + middle - 7
        else:
            level = start.y + BOX_HEIGHT + _LABEL_HEAD + 6
            points = (
                Point(start.x + BOX_WIDTH, start.y + middle),
                Point(start.x + BOX_WIDTH + _TURN, start.y + middle),
                Point(start.x + BOX_WIDTH + _TURN, level),
                Point(end.x - _TURN, level),
                Point(end.x - _TURN, end.y + middle),
                Point(end.x, end.y + middle),
            )
            left, baseline = start.x + BOX_WIDTH - label_width(text), level - 5
        return (
            Line(points=points, kind="edge", title=arrow.title),
            Label(
                text=text,
                left=left,
                baseline=baseline,
                kind="edge",
                anchor="middle" if start.y == end.y else "end",
            ),
        )


def pipeline_picture(cut_facts: Mapping[str, Any]) -> Element:
    """Return the drawings of a pipeline for all widths, with buttons that the script of the page shows."""
    size_classes: dict[int, list[str]] = {}
    for size_class, most_columns in _MOST_COLUMNS.items():
        size_classes.setdefault(column_counts(len(cut_facts["stages"]), most_columns), []).append(size_class)
    drawings = [
        pipeline_drawing(cut_facts, pipeline_layout(cut_facts, columns), " ".join(classes))
        for columns, classes in size_classes.items()
    ]
    buttons = [
        html_element("button", button_text, type="button", data_zoom=zoom) for zoom, button_text in _BUTTONS.items()
    ]
    return html_element(
        "div",
        html_element("div", buttons, class_="zoom", hidden="hidden"),
        *drawings,
        class_="picture",
        role="group",
        aria_label="picture of the pipeline",
    )


def pipeline_drawing(cut_facts: Mapping[str, Any], layout: PipelineLayout, class_: str) -> Element:
    """Return one drawing of a pipeline."""
    slowest = max((stage["picoseconds"] for stage in cut_facts["stages"]), default=0) or 1
    edges, boxes = cut_facts["edges"], layout.boxes
    return html_element(
        "svg",
        [element for line in layout.lines for element in _line(line)],
        _end_box("input", [edge["name"] for edge in edges if edge["producer"] is None], boxes[0]),
        [_stage_box(stage, box, slowest) for stage, box in zip(cut_facts["stages"], boxes[1:-1], strict=True)],
        _end_box("result", [edge["name"] for edge in edges if edge["result"]], boxes[-1]),
        [_label(label) for label in layout.labels],
        class_=class_,
        role="img",
        aria_label="the stages and the values that cross between them",
        viewBox=f"0 0 {layout.width:g} {layout.height:g}",
        width=round(layout.width * _LARGEST_SCALE),
        height=round(layout.height * _LARGEST_SCALE),
    )


def shortened_path(path: str, character_count: int) -> str:
    """Return the path of a module in so many characters: its end, with its last number, which tells the layer."""
    if len(path) <= character_count:
        return path
    names = path.split(".")
    layer = max((index for index, name in enumerate(names) if name.isdigit()), default=0)
    if layer == 0:
        return f"…{path[1 - character_count :]}"
    # An end of more names than characters does not fit.
    for first in range(max(1, len(names) - character_count), layer + 1):
        end = ".".join(names[first:])
        if len(end) < character_count:
            return f"…{end}"
    return f"…{shortened('.'.join(names[layer:]), character_count - 1)}"


def shortened(text: str, character_count: int) -> str:
    """Return a text in so many characters: its start."""
    return text if len(text) <= character_count else f"{text[: character_count - 1]}…"


def _line(line: Line) -> Iterator[Element]:
    first, *others = line.points
    path = f"M{first.x:g} {first.y:g}" + "".join(f"L{point.x:g} {point.y:g}" for point in others)
    yield html_element("path", html_element("title", line.title), d=path, class_=f"line {line.kind}")
    if line.has_dot:
        yield html_element("circle", cx=first.x, cy=first.y, r=2.5, class_=f"head {line.kind}")
    if line.has_head:
        yield html_element("polygon", points=_head_points(line.points), class_=f"head {line.kind}")


def _head_points(points: Sequence[Point]) -> str:
    """The corners of an arrow head at the end of a line, which points right or down."""
    (before_x, _), (x, y) = points[-2:]
    is_down = before_x == x
    corners = [(x, y), *([(x - 3.5, y - 8), (x + 3.5, y - 8)] if is_down else [(x - 8, y - 4), (x - 8, y + 4)])]
    return " ".join(f"{corner_x:g},{corner_y:g}" for corner_x, corner_y in corners)


def _label(label: Label) -> Element:
    return html_element(
        "text",
        label.text,
        x=label.x,
        y=label.baseline,
        text_anchor=label.anchor,
        class_=f"label {label.kind}",
    )


def _stage_box(stage: Mapping[str, Any], corner: Point, slowest: int) -> Element:
    module = stage["starts_at"] or "the model"
    weights, time = format_bytes(stage["weight_bytes"]), format_time(stage["picoseconds"])
    name = f"stage {stage['stage']}"
    center = corner.x + BOX_WIDTH / 2
    bar_width = BOX_WIDTH - 2 * _BAR_LEFT
    bar_place = {
        "x": corner.x + _BAR_LEFT,
        "y": corner.y + BOX_HEIGHT - _BAR_LEFT - _BAR_HEIGHT / 2,
        "height": _BAR_HEIGHT,
    }
    return html_element(
        "g",
        html_element("title", f"{name}: starts at {module}, {weights} of weights, {time}"),
        html_element("rect", x=corner.x, y=corner.y, width=BOX_WIDTH, height=BOX_HEIGHT, rx=6, class_="box"),
        html_element("text", name, x=center, y=corner.y + 19, class_="name"),
        html_element("text", shortened_path(module, _NAME_CHARACTERS), x=center, y=corner.y + 34, class_="module"),
        html_element("text", f"{weights}, {time}", x=center, y=corner.y + 49, class_="costs"),
        html_element("rect", width=bar_width, **bar_place, class_="track"),
        html_element("rect", width=round(bar_width * stage["picoseconds"] / slowest, 1), **bar_place, class_="time"),
    )


def _end_box(name: str, value_names: Sequence[str], corner: Point) -> Element:
    """The input or the result."""
    center = corner.x + BOX_WIDTH / 2
    names = ", ".join(value_names)
    return html_element(
        "g",
        html_element("title", f"{name}: {names}"),
        html_element("rect", x=corner.x, y=corner.y, width=BOX_WIDTH, height=BOX_HEIGHT, rx=24, class_="end"),
        html_element("text", name, x=center, y=corner.y + 29, class_="name"),
        html_element("text", shortened(names, _END_CHARACTERS), x=center, y=corner.y + 45, class_="module"),
    )
