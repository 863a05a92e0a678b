"""The drawing of a pipeline: nothing lies on anything else or outside, for any number of stages and any edges."""

import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple
from xml.etree.ElementTree import tostring

import pytest

from stagepack.cli.report.pipeline_drawing import (
    BOX_HEIGHT,
    BOX_WIDTH,
    LABEL_SIZE,
    PipelineLayout,
    column_counts,
    pipeline_layout,
    pipeline_picture,
    shortened_path,
)

Edges = list[tuple[int | None, list[int], bool]]


class Area(NamedTuple):
    """A rectangle."""

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


def box_areas(layout: PipelineLayout) -> list[Area]:
    return [Area(box.x, box.y, box.x + BOX_WIDTH, box.y + BOX_HEIGHT) for box in layout.boxes]


def label_areas(layout: PipelineLayout) -> list[Area]:
    return [
        Area(label.left, label.baseline - LABEL_SIZE, label.left + label.width, label.baseline + 3)
        for label in layout.labels
    ]


def line_areas(layout: PipelineLayout) -> list[Area]:
    """The segments of the lines."""
    return [
        Area(min(start.x, end.x), min(start.y, end.y), max(start.x, end.x), max(start.y, end.y))
        for line in layout.lines
        for start, end in itertools.pairwise(line.points)
    ]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("stage_count", [1, 2, 8, 24])
@pytest.mark.parametrize("most_columns", [2, 4, 7])
def test_nothing_overlaps_and_all_is_inside(stage_count: int, most_columns: int, pattern: str) -> None:
    columns = column_counts(stage_count, most_columns)
    layout = pipeline_layout(facts(stage_count, PATTERNS[pattern](stage_count)), columns)
    boxes, labels, lines = box_areas(layout), label_areas(layout), line_areas(layout)
    page = Area(0, 0, layout.width, layout.height)
    for area in (*boxes, *labels, *lines):
        assert page.left <= area.left
        assert area.right <= page.right
        assert page.top <= area.top
        assert area.bottom <= page.bottom
    assert not [pair for pair in itertools.combinations([*boxes, *labels], 2) if pair[0].overlaps(pair[1])]
    assert not [(area, line) for area in (*boxes, *labels) for line in lines if area.overlaps(line)]
    assert all(
        start.x == end.x or start.y == end.y for line in layout.lines for start, end in itertools.pairwise(line.points)
    )


@pytest.mark.parametrize("pattern", PATTERNS)
def test_lines_of_different_values_only_cross(pattern: str) -> None:
    layout = pipeline_layout(facts(24, PATTERNS[pattern](24)), 7)
    titles = [line.title for line in layout.lines for _ in itertools.pairwise(line.points)]
    segments = list(zip(titles, line_areas(layout), strict=True))
    for (title, one), (other_title, other) in itertools.combinations(segments, 2):
        both_across = one.top == one.bottom == other.top == other.bottom
        both_down = one.left == one.right == other.left == other.right
        shared = min(one.right, other.right) - max(one.left, other.left) if both_across else -1.0
        shared = min(one.bottom, other.bottom) - max(one.top, other.top) if both_down else shared
        assert shared <= 0 or title in other_title or other_title in title


def test_each_arrow_has_a_label_and_a_head() -> None:
    layout = pipeline_layout(facts(8, u_net(8) + each_returned(8)), 5)
    # 9 steps, 3 values that skip stages, and 7 results of other stages, which share one head.
    assert len(layout.labels) == 9 + 3 + 7
    assert sum(line.has_head for line in layout.lines) == 9 + 3 + 1


def test_there_is_a_drawing_for_each_width() -> None:
    picture = pipeline_picture(facts(24, u_net(24)))
    drawings = picture.findall("svg")
    assert [drawing.get("class") for drawing in drawings] == ["narrow", "medium", "wide"]
    assert "&lt;value_0&gt;" in tostring(picture, encoding="unicode")
    # Two stages are drawn alike on a medium and a wide screen.
    assert [drawing.get("class") for drawing in pipeline_picture(facts(2, [])).findall("svg")] == [
        "narrow",
        "medium wide",
    ]


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
