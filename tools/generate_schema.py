"""Write ``schema/v1`` from the types and the list of operators of `stagepack.format`; with ``--check``, compare instead."""

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from stagepack.adapter.document import AdapterDocument
from stagepack.deltas.document import DeltaDocument
from stagepack.format.graph import FoldedGraph
from stagepack.format.manifest import MAJOR, Manifest
from stagepack.format.operators import random_operators

FOLDER = Path(__file__).parents[1] / "schema" / f"v{MAJOR}"


def schema_of(root: type, title: str) -> str:
    """The JSON Schema of a type as text."""
    (_, components) = msgspec.json.schema_components([root], ref_template="#/$defs/{name}")
    types = {name: _described(components[name]) for name in sorted(components)}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **types.pop(root.__name__), "$defs": types}
    return json.dumps({**schema, "title": title}, indent=1, ensure_ascii=False) + "\n"


def _described(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with the texts of the docstring's ``Attributes`` at the fields that they describe."""
    text, _, attributes = inspect.cleandoc(schema.get("description", "")).partition("\n\nAttributes:\n")
    entries = attributes.replace("\n        ", " ").splitlines()
    described = dict(entry.strip().split(": ", 1) for entry in entries if ": " in entry)
    for name, field in schema.get("properties", {}).items():
        if name in described:
            field["description"] = described[name]
    return {**schema, "description": text.replace("\n\n", "\n")}


def main(arguments: list[str]) -> int:
    """Write the files, or tell which ones differ."""
    wanted = {
        "adapter.schema.json": schema_of(AdapterDocument, "manifest.json of a stagepack adapter"),
        "manifest.schema.json": schema_of(Manifest, "manifest.json of a stagepack bundle"),
        "delta.schema.json": schema_of(DeltaDocument, "manifest.json of a stagepack delta"),
        "graph.schema.json": schema_of(FoldedGraph, "A stage's graph, as the JSON that stands for its msgpack"),
        "random-operators.txt": "".join(f"{name}\n" for name in sorted(random_operators())),
    }
    if arguments != ["--check"]:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name, text in wanted.items():
            (FOLDER / name).write_text(text)
        return 0
    found = {path.name: path.read_text() for path in FOLDER.glob("*")}
    differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if differing:
        print(f"{', '.join(differing)}: not what the code gives: run python tools/generate_schema.py", file=sys.stderr)
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
