"""The drawing of a pipeline: nothing lies on anything else or outside, for any number of stages and any edges."""

import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, tostring

import pytest

from stagepack.cli.report.pipeline_drawing import pipeline_drawing, shortened_path

# Of a label: its height, and the widest mean width of a character.
LABEL_SIZE, LABEL_CHARACTER = 11, 6.6

Edges = list[tuple[int | None, list[int], bool]]


class Area(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Area") -> bool:
        """Whether they have inner points in common; a line has none of its own, and is one."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def chain(stage_count: int) -> Edges:
    """An edge from each stage to the next one."""
    return [(None, [0], False), *((stage, [stage + 1], False) for stage in range(stage_count - 1))]


def u_net(stage_count: int) -> Edges:
    """An edge from each stage of the first half to its mirror image."""
    return [(stage, [stage_count - 1 - stage], False) for stage in range(stage_count // 2 - 1)]


def to_all(producer: int | None, stage_count: int) -> Edges:
    """One value for all later stages."""
    return [(producer, list(range(0 if producer is None else producer + 1, stage_count)), False)]


def each_returned(stage_count: int) -> Edges:
    """A result from each stage, such as its cache."""
    return [(stage, [], True) for stage in range(stage_count)]


def any_edges(stage_count: int, seed: int) -> Edges:
    """Edges between any stages, the same for a seed."""
    chooser = random.Random(seed)  # noqa: S311 - not for secrets
    pairs = [pair for pair in itertools.combinations(range(stage_count), 2) if chooser.random() < 0.2]
    return [(producer, [consumer], chooser.random() < 0.3) for producer, consumer in pairs]


PATTERNS: dict[str, Callable[[int], Edges]] = {
    "chain": lambda count: [],
    "u-net": u_net,
    "input-to-all": lambda count: to_all(None, count),
    "first-to-all": lambda count: to_all(0, count),
    "caches": lambda count: to_all(None, count) + each_returned(count),
    "all-of-these": lambda count: u_net(count) + to_all(None, count) + to_all(0, count) + each_returned(count),
    "input-returned": lambda count: [(None, [], True)],
    "any-0": lambda count: any_edges(count, 0),
    "any-1": lambda count: any_edges(count, 1),
}


def facts(stage_count: int, edges: Edges) -> dict[str, Any]:
    """The facts of a cut with the widest numbers of bytes."""
    stages = [
        {
            "stage": stage,
            "starts_at": f"model.layers.{stage}.self_attn.q_proj",
            "weight_bytes": 999_900_000,
            "picoseconds": stage,
        }
        for stage in range(stage_count)
    ]
    edges = [*chain(stage_count), *edges, (stage_count - 1, [], True)]
    return {
        "stages": stages,
        "edges": [
            {
                "name": f"<value_{index}>",
                "producer": producer,
                "consumers": consumers,
                "result": is_result,
                "bytes": 999_900,
            }
            for index, (producer, consumers, is_result) in enumerate(edges)
        ],
    }


def areas(drawing: Element, css_class: str) -> list[Area]:
    rectangles = [element for element in drawing.iter("rect") if element.get("class") == css_class]
    corners = [[float(element.get(side, 0)) for side in ("x", "y", "width", "height")] for element in rectangles]
    return [Area(x, y, x + width, y + height) for x, y, width, height in corners]


def label_areas(drawing: Element) -> list[Area]:
    labels = [element for element in drawing.iter("text") if element.get("class") == "label" and element.text]
    return [
        Area(x, y - LABEL_SIZE, x + LABEL_CHARACTER * len(label.text or ""), y + 3)
        for label in labels
        for x, y in [(float(label.get("x", 0)), float(label.get("y", 0)))]
    ]


def segments(net: Element) -> Iterator[Area]:
    """The lines of a net, all at right angles."""
    line = r"M([\d.]+) ([\d.]+)([HV])([\d.]+)"
    [path] = net.findall("path")
    assert re.fullmatch(f"({line})+", path.get("d") or "")
    for x, y, direction, end in re.findall(line, path.get("d") or ""):
        end_x, end_y = (end, y) if direction == "H" else (x, end)
        across, down = sorted((float(x), float(end_x))), sorted((float(y), float(end_y)))
        yield Area(across[0], down[0], across[1], down[1])


def nets(drawing: Element) -> list[Element]:
    return [element for element in drawing.iter("g") if (element.get("class") or "").startswith("net")]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("stage_count", [1, 2, 8, 24])
def test_nothing_overlaps_and_all_is_inside(stage_count: int, pattern: str) -> None:
    drawing = pipeline_drawing(facts(stage_count, PATTERNS[pattern](stage_count)))
    boxes = [*areas(drawing, "box"), *areas(drawing, "end")]
    costs = {element for group in drawing.findall("g") if not group.get("class") for element in group.iter("text")}
    outside = [area for area in label_areas(drawing) if not any(area.overlaps(box) for box in boxes)]
    assert len(boxes) == stage_count + 2
    assert len(label_areas(drawing)) - len(outside) == sum(element.get("class") == "label" for element in costs)
    lines = [segment for net in nets(drawing) for segment in segments(net)]
    page = Area(0, 0, float(drawing.get("width", 0)), float(drawing.get("height", 0)))
    for area in (*boxes, *outside, *lines):
        assert page.left <= area.left
        assert area.right <= page.right
        assert page.top <= area.top
        assert area.bottom <= page.bottom
    assert not [pair for pair in itertools.combinations([*boxes, *outside], 2) if pair[0].overlaps(pair[1])]
    assert not [(area, line) for area in (*boxes, *outside) for line in lines if area.overlaps(line)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_lines_of_different_values_only_cross(pattern: str) -> None:
    drawing = pipeline_drawing(facts(24, PATTERNS[pattern](24)))
    for one_net, other_net in itertools.combinations(nets(drawing), 2):
        for one, other in itertools.product(segments(one_net), segments(other_net)):
            both_across = one.top == one.bottom == other.top == other.bottom
            both_down = one.left == one.right == other.left == other.right
            assert not both_across or min(one.right, other.right) <= max(one.left, other.left)
            assert not both_down or min(one.bottom, other.bottom) <= max(one.top, other.top)


def test_each_arrow_has_a_label_and_a_head() -> None:
    drawing = pipeline_drawing(facts(8, u_net(8) + each_returned(8)))
    drawn = [element for net in nets(drawing) for element in net]
    # 9 steps, 3 values that skip stages, and 7 results of other stages, which share one head.
    assert sum(element.tag == "text" for element in drawn) == 9 + 3 + 7
    assert sum(element.tag == "polygon" for element in drawn) == 9 + 3 + 1
    titles = [net.findtext("title") or "" for net in nets(drawing)]
    assert "stage 0 to stage 7: <value_8>, 999.9 kB" in titles
    assert sum(title.count(" to result: ") for title in titles) == 7
    assert "&lt;value_0&gt;" in tostring(drawing, encoding="unicode")


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("layers.3.mlp", "layers.3.mlp"),
        ("model.layers.12.mlp", "…layers.12.mlp"),
        ("encoder.block.0.layer.0", "…block.0.layer.0"),
        ("model.layers.5.self_attn", "…5.self_attn"),
        ("model.layers.5.post_attention_layernorm", "…5.post_attentio…"),
        ("a_module_without_any_number", "…thout_any_number"),
    ],
)
def test_the_layer_of_a_long_path_is_kept(path: str, shown: str) -> None:
    assert shortened_path(path, 17) == shown
