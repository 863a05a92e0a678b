"""The graph of the stages as text for Graphviz and Mermaid."""

import json
from collections.abc import Iterator
from typing import Any

from stagepack.cli.quantities import format_bytes


def dot(facts: dict[str, Any]) -> str:
    """The graph in the DOT language (https://graphviz.org/doc/info/lang.html)."""
    lines = ["digraph stages {", "  rankdir=LR;", "  node [shape=box];", "  input [shape=plaintext];"]
    for stage in facts["stages"]:
        lines.append(f"  stage{stage['stage']} [label={json.dumps(_label(stage, chr(10)))}];")
    for source, target, names, size in arrows(facts):
        lines.append(f"  {source} -> {target} [label={json.dumps(f'{names}{chr(10)}{format_bytes(size)}')}];")
    return "\n".join([*lines, "}"])


def mermaid(facts: dict[str, Any]) -> str:
    """The graph as a Mermaid flowchart (https://mermaid.js.org/syntax/flowchart.html)."""
    lines = ["flowchart LR", "  input([input])"]
    for stage in facts["stages"]:
        lines.append(f'  stage{stage["stage"]}["{_escaped(_label(stage, "<br/>"))}"]')
    for source, target, names, size in arrows(facts):
        lines.append(f'  {source} -->|"{_escaped(names)}<br/>{format_bytes(size)}"| {target}')
    return "\n".join(lines)


def _label(stage: dict[str, Any], line_break: str) -> str:
    module = f"{line_break}from {stage['starts_at']}" if stage["starts_at"] else ""
    return f"stage {stage['stage']}{module}{line_break}{format_bytes(stage['weight_bytes'])} of weights"


def _escaped(text: str) -> str:
    """A text inside the quotes of Mermaid: the quote itself is written as an entity."""
    return text.replace('"', "#quot;")


def arrows(facts: dict[str, Any]) -> Iterator[tuple[str, str, str, int]]:
    """Yield, for each pair of stages that a value joins, the two, the names of the values, and their bytes."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for edge in facts["edges"]:
        source = "input" if edge["producer"] is None else f"stage{edge['producer']}"
        for consumer in edge["consumers"]:
            found.setdefault((source, f"stage{consumer}"), []).append(edge)
    for (source, target), edges in found.items():
        names = ", ".join(edge["name"] for edge in edges[:3]) + (
            f" and {len(edges) - 3} more" if len(edges) > 3 else ""
        )
        yield source, target, names, sum(edge["bytes"] for edge in edges)
