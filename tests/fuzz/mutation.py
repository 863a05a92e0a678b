"""Random changes of the structure of a bundle, with its sizes and digests made right afterwards."""

import contextlib
import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack

from tests.bundle_editor import BundleEditor
from tests.protobuf_fields import message, message_fields

INFINITY = float("inf")
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 64, 65, 2**31, 2**62, 2**63 - 1, -(2**63), 0.5, -0.0, 1e308, INFINITY,
    "", "x", "self", "for", "cpu", "cuda", "meta", "float32", "int64", "complex128", "batch", "linear_1", "w1", "first.weight",
    "aten.relu.default", "operator.add", "higher_order.cond", "tanh", "../x", "\0",
    [], [0], ["value", "linear_1"], ["value", "w1"], ["list", []], ["device", None], ["device", "cuda"], ["dtype", "int8"],
    ["complex", 1.0, 2.0], ["complex", INFINITY, 0.0], ["complex", 0.0, -INFINITY], ["slice", 0, 1, None], ["subgraph", 0], {},
    {"op": "add", "args": ["batch", 1]},
]  # fmt: skip
WRAPPERS: list[Callable[[Any], Any]] = [
    lambda value: [value],
    lambda value: ["list", [value]],
    lambda value: ["dict", [["k", value]]],
    lambda value: {"op": "add", "args": [value, 1]},
    lambda value: {"type": "sequence", "kind": "list", "items": [value]},
]
SIZES = [0, 1, 2, 3, 4, 8, 64, 2**20, 2**31, 2**40, 2**62, 2**63 - 1, -1, -2, -(2**63)]


def locations(fields: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each location inside of plain containers: a container, and an index or key."""
    keys: Any = list(fields) if isinstance(fields, dict) else range(len(fields)) if isinstance(fields, list) else ()
    for key in keys:
        yield fields, key
        yield from locations(fields[key])


def mutate(fields: Any, generator: random.Random, values: Sequence[Any] = VALUES) -> None:
    """Change one location: another value, one from another location, none, the same twice, a deep nest, an unknown field, a number near."""
    found = list(locations(fields))
    container, key = generator.choice(found)
    kind = generator.randrange(7)
    if kind < 2:
        container[key] = copy.deepcopy(generator.choice(values))
    elif kind == 2:
        other, other_key = generator.choice(found)
        container[key] = copy.deepcopy(other[other_key])
    elif kind == 3:
        del container[key]
    elif kind == 4 and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    elif kind == 5:
        wrap = generator.choice(WRAPPERS)
        for _ in range(generator.choice([1, 3, 63, 64, 65, 120])):
            container[key] = wrap(container[key])
    elif kind == 6 and isinstance(container, dict):
        container[generator.choice(["unknown", *container])] = copy.deepcopy(generator.choice(values))
    elif isinstance(container[key], int) and not isinstance(container[key], bool):
        container[key] += generator.choice([-1, 1, 64, -64])


def mutate_alike(fields: Any, generator: random.Random, operators: Sequence[Any]) -> None:
    """Change one location to a value of the same kind, so that more of the reader accepts it.

    A number becomes another number, an operator another operator with its schema, a list has two items exchanged, and anything else becomes
    what is at another location of the same kind.
    """
    found = list(locations(fields))
    container, key = generator.choice(found)
    value = container[key]
    alike = [
        other[other_key]
        for other, other_key in found
        if type(other[other_key]) is type(value)
        and other[other_key] != value
        and _depth(value) == _depth(other[other_key])
    ]
    if isinstance(value, dict) and "schema" in value:
        container[key] = copy.deepcopy(generator.choice(operators))
    elif isinstance(value, int | float) and not isinstance(value, bool) and generator.random() < 0.7:
        container[key] = generator.choice([value - 1, value + 1, value * 2, -value, *SIZES])
    elif isinstance(value, bool):
        container[key] = not value
    elif isinstance(value, list) and len(value) > 1 and generator.random() < 0.3:
        first, second = generator.sample(range(len(value)), 2)
        value[first], value[second] = value[second], value[first]
    elif alike:
        container[key] = copy.deepcopy(generator.choice(alike))
    else:
        mutate(fields, generator)


def _depth(value: Any) -> str:
    """What must be equal for two values to take each other's place: for a tagged list its tag, for a dict its keys."""
    if isinstance(value, dict):
        return ",".join(sorted(map(str, value)))
    return str(value[0]) if isinstance(value, list) and value and isinstance(value[0], str) else ""


def mutate_file(
    editor: BundleEditor, file_name: str, generator: random.Random, change_one: Callable[[Any], None] | None = None
) -> None:
    """Change one to three locations in the structure of one file of a bundle, by default by `mutate`, and make sizes and digests right."""

    def change(fields: Any) -> None:
        for _ in range(generator.choice([1, 1, 2, 3])):
            if not fields:
                return
            if change_one is None:
                mutate(fields, generator)
            else:
                change_one(fields)

    # What is nested too deep to be written stays as it was.
    with contextlib.suppress(RecursionError, ValueError):
        if file_name == "manifest.json":
            editor.edit_manifest(change)
        elif file_name.endswith(".msgpack"):
            editor.edit_graph_file(file_name, change)
        elif file_name.endswith(".onnx"):
            fields = message_fields((editor / file_name).read_bytes())
            change(fields)
            # As does what is no message any more.
            with contextlib.suppress(AttributeError, KeyError, TypeError):
                editor.write_file(file_name, message(fields))
        elif file_name.endswith(".json"):
            change(fields := json.loads((editor / file_name).read_bytes()))
            editor.write_file(file_name, json.dumps(fields, ensure_ascii=False).encode(errors="surrogatepass"))
        else:
            editor.edit_weight_header(file_name, change)


def operators_of(bundle: Path) -> list[Any]:
    """Return the entries of the op tables of a bundle."""
    graphs = (msgpack.unpackb(graph_path.read_bytes()) for graph_path in sorted(bundle.glob("*.msgpack")))
    return [op for graph in graphs for op in graph.get("ops", [])]
