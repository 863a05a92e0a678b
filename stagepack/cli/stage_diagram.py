"""The graph of the stages as text for Graphviz and Mermaid."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stagepack.format.quantities import format_bytes

_MAX_LABEL_NAMES = 3


class _Arrow(NamedTuple):
    """All edges from one stage, or from the input, to another stage or to the result.

    Attributes:
        source: ``input``, or ``stage`` and a number.
        target: ``stage`` and a number, or ``result``.
        label: names of the first edges.
        byte_count: bytes of all these edges in one call.
    """

    source: str
    target: str
    label: str
    byte_count: int


def _arrows(cut_facts: Mapping[str, Any]) -> Iterator[_Arrow]:
    """An arrow for each pair of stages that edges connect, and for each stage with results, from the facts of a cut."""
    edges_between: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for edge in cut_facts["edges"]:
        source = "input" if edge["producer"] is None else f"stage{edge['producer']}"
        targets = [f"stage{consumer}" for consumer in edge["consumers"]] + ["result"] * edge["result"]
        for target in targets:
            edges_between.setdefault((source, target), []).append(edge)
    for (source, target), edges in edges_between.items():
        yield _Arrow(source, target, _edges_label(edges), sum(edge["bytes"] for edge in edges))


def _edges_label(edges: Sequence[dict[str, Any]]) -> str:
    """The names of the first edges, and how many more there are."""
    label = ", ".join(edge["name"] for edge in edges[:_MAX_LABEL_NAMES])
    return label if len(edges) <= _MAX_LABEL_NAMES else f"{label} and {len(edges) - _MAX_LABEL_NAMES} more"


def graphviz_lines(cut_facts: dict[str, Any]) -> Iterator[str]:
    """Yield the graph in the DOT language (https://graphviz.org/doc/info/lang.html)."""
    yield from (
        "digraph stages {",
        "  rankdir=LR;",
        "  node [shape=box];",
        "  input [shape=plaintext];",
        "  result [shape=plaintext];",
    )
    for stage in cut_facts["stages"]:
        yield f"  stage{stage['stage']} [label={json.dumps(_stage_label(stage, chr(10)))}];"
    for arrow in _arrows(cut_facts):
        label = json.dumps(f"{arrow.label}\n{format_bytes(arrow.byte_count)}")
        yield f"  {arrow.source} -> {arrow.target} [label={label}];"
    yield "}"


def mermaid_lines(cut_facts: dict[str, Any]) -> Iterator[str]:
    """Yield the graph as a Mermaid flowchart (https://mermaid.js.org/syntax/flowchart.html)."""
    yield from ("flowchart LR", "  input([input])", "  result([result])")
    for stage in cut_facts["stages"]:
        yield f'  stage{stage["stage"]}["{_escape_quotes(_stage_label(stage, "<br/>"))}"]'
    for arrow in _arrows(cut_facts):
        label = f"{_escape_quotes(arrow.label)}<br/>{format_bytes(arrow.byte_count)}"
        yield f'  {arrow.source} -->|"{label}"| {arrow.target}'


def _stage_label(stage: dict[str, Any], line_break: str) -> str:
    module = f"{line_break}from {stage['starts_at']}" if stage["starts_at"] else ""
    return f"stage {stage['stage']}{module}{line_break}{format_bytes(stage['weight_bytes'])} of weights"


def _escape_quotes(label: str) -> str:
    """Return a text for use inside the quotes of Mermaid, where a quote is written as an entity."""
    return label.replace('"', "#quot;")
