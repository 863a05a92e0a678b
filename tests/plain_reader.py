"""Unfold a graph as SPEC.md says, on plain containers: what a reader in another language would write."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


def fill(template: str, texts: Sequence[str]) -> str:
    """A template with texts in its holes."""

    def part(found: re.Match[str]) -> str:
        if found[0] in ("{{", "}}"):
            return found[0][0]
        text = texts[int(found[1])]
        return str(int(text) + int(found[2])) if found[2] else text

    return re.sub(r"\{\{|\}\}|\{(\d+)([+-]\d+)?\}", part, template)


def filled(part: Any, texts: Sequence[str]) -> Any:
    """A part of a region with texts in the holes of all that is named in it."""
    if isinstance(part, list):
        if part[:1] == ["value"]:
            return ["value", fill(part[1], texts)]
        return [filled(item, texts) for item in part]
    if isinstance(part, dict):
        named: dict[str, Any] = {
            key: fill(part[key], texts) for key in ("name", "value", "path", "base") if isinstance(part.get(key), str)
        }
        named |= {key: [fill(name, texts) for name in part[key]] for key in ("names",) if key in part}
        dims = {key: dims_filled(part[key], texts) for key in ("shape", "expr") if part.get(key) is not None}
        return {key: filled(item, texts) for key, item in part.items()} | named | dims
    return part


def dims_filled(dim: Any, texts: Sequence[str]) -> Any:
    """A dimension, or several, with texts in the holes of symbols."""
    if isinstance(dim, list):
        return [dims_filled(item, texts) for item in dim]
    if isinstance(dim, dict):
        return dim | {"args": dims_filled(dim["args"], texts)}
    return fill(dim, texts) if isinstance(dim, str) else dim


def call_filled(call: dict[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """The call of a module with texts in the holes of what a region leaves open in it."""

    def tree(part: Any) -> Any:
        if isinstance(part, list):
            return [tree(item) for item in part]
        if isinstance(part, dict) and part.get("type") == "value":
            return part | {"name": fill(part["name"], texts)}
        return {key: tree(item) for key, item in part.items()} if isinstance(part, dict) else part

    made = {**call, "path": fill(call["path"], texts), "first": fill(call["first"], texts)}
    return made | ({"signature": tree(call["signature"])} if "signature" in call else {})


class Unfolded(NamedTuple):
    """The nodes of a graph, each with the path of its scope; and in any order the weights, and the calls of modules."""

    nodes: list[tuple[dict[str, Any], str]]
    weights: list[dict[str, Any]]
    calls: list[dict[str, Any]]


def unfold(graph: dict[str, Any]) -> Unfolded:
    """Fill in the calls of regions."""
    weights, calls = list(graph.get("weights", [])), list(graph.get("calls", []))

    def nodes(body: dict[str, Any], texts: Sequence[str] | None) -> Iterator[tuple[dict[str, Any], str]]:
        for item in body.get("nodes", []):
            if isinstance(item, dict):
                path = body["scopes"][item.get("scope", 0)]["path"]
                yield (item, path) if texts is None else (filled(item, texts), fill(path, texts))
            else:
                region = graph["regions"][item[0]]
                inner = item[1] if texts is None else [fill(text, texts) for text in item[1]]
                weights.extend(filled(weight, inner) for weight in region.get("weights", []))
                calls.extend(call_filled(call, inner) for call in region.get("calls", []))
                yield from nodes(region, inner)

    found = list(nodes(graph, None))
    return Unfolded(found, list({json.dumps(weight): weight for weight in weights}.values()), calls)
