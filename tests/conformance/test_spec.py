"""``schema/SPEC.md``, the code and the vectors say the same: rules, fields, closed sets and the worked example."""

import json
import keyword
import re
import subprocess
import sys
from itertools import groupby
from typing import Any

import msgpack
import msgspec
import pytest

from stagepack.adapter import document as adapter_document
from stagepack.deltas import document
from stagepack.format import dtypes, folded_graph, graph, limits, manifest, plan, shapes, tree
from stagepack.format.operators import DENIED, HIGHER_ORDER_OPERATORS, PYTHON_OPERATORS, listed_verdicts
from tests.conformance.vectors import SCHEMA, TINY, all_rules, cases

ROOT = SCHEMA.parent
SPEC = (SCHEMA / "SPEC.md").read_text()
TYPES = {
    name: kind
    for module in (manifest, plan, tree, shapes, graph, folded_graph, document, adapter_document)
    for name, kind in vars(module).items()
    if isinstance(kind, type)
    and issubclass(kind, msgspec.Struct)
    and kind.__name__[0] != "_"
    and kind is not msgspec.Struct
}
TYPES["Graph"] = TYPES.pop("FoldedGraph")  # what a graph file holds


def rules_in_code() -> set[str]:
    """The rules that errors of the code name: any letter and number, in quotes or brackets, but the dtypes of weight files."""
    sources = [path.read_text() for folder in ("stagepack", "loaders") for path in (ROOT / folder).rglob("*.py")]
    named = {rule for source in sources for rule in re.findall(r'["\[]([A-Z]\d{1,2})["\]]', source)}
    return named - dtypes.HEADER_ITEM_SIZE.keys()


def test_every_rule_is_stated_checked_and_has_a_case() -> None:
    stated = list(all_rules())
    assert len(set(stated)) == len(stated)
    assert rules_in_code() == set(stated)
    assert {rule for case in cases() for rule in case.rules} == set(stated)


def test_rules_are_numbered_without_gaps() -> None:
    for letter, rules in groupby(all_rules(), key=lambda rule: rule[0]):
        numbers = [int(rule[1:]) for rule in rules]
        assert numbers == list(range(1, len(numbers) + 1)), letter


def test_the_changes_name_the_rules() -> None:
    changes = (SCHEMA / "CHANGES.md").read_text()
    named = set(re.findall(r"\b[A-Z]\d+\b", changes))
    for letter, first, last in re.findall(r"\b([A-Z])(\d+) to \1(\d+)\b", changes):
        named |= {f"{letter}{number}" for number in range(int(first), int(last) + 1)}
    assert named == set(all_rules())


@pytest.mark.parametrize("name", re.findall(r"^\| field of (?:an?|the) (\w+)", SPEC, re.MULTILINE))
def test_fields_stand_in_the_order_of_the_tables(name: str) -> None:
    table = re.search(
        rf"^\| field of (?:an?|the) {name} \| type \| default \|.*\n\|---.*\n((?:\|.*\n)+)", SPEC, re.MULTILINE
    )
    assert table
    rows = [[cell.strip() for cell in row.split("|")] for row in table[1].splitlines()]
    stated = [(row[1].strip("`"), row[3].strip("`")) for row in rows]
    assert stated == [(field.name, default_of(field)) for field in msgspec.structs.fields(TYPES[name])]


def test_items_of_a_part_stand_in_the_order_of_their_table() -> None:
    table = re.search(r"^\| item of a Part \|.*\n\|---.*\n((?:\|.*\n)+)", SPEC, re.MULTILINE)
    assert table
    assert tuple(re.findall(r"^\| `(\w+)` ", table[1], re.MULTILINE)) == document.Part.__struct_fields__


def default_of(field: msgspec.structs.FieldInfo) -> str:
    """The default of a field as the tables write it."""
    if field.default_factory is not msgspec.NODEFAULT:
        return json.dumps(msgspec.to_builtins(field.default_factory()))
    if field.default is msgspec.NODEFAULT:
        return ""
    return "none" if field.default is None else json.dumps(msgspec.to_builtins(field.default))


def test_every_type_is_described() -> None:
    assert all(re.search(rf"\b{name}\b", SPEC) for name in TYPES if not name.endswith(("Arg", "Leaf", "Tree")))
    trees = {kind.__struct_config__.tag for kind in (*tree.Tree.__args__,)}
    assert trees == set(re.findall(r"^\| `(\w+)` \| `[a-z_]+`: ", SPEC, re.MULTILINE))
    configs = [kind.__struct_config__ for kind in TYPES.values()]
    arguments = {config.tag for config in configs if config.array_like and config.tag is not None}
    assert arguments == set(re.findall(r'^\| `\["(\w+)", ', SPEC, re.MULTILINE))


def test_closed_sets_are_those_of_the_code() -> None:
    keywords, functions, denied = (set(block.split()) for block in re.findall(r"```text\n(.*?)```", SPEC, re.DOTALL))
    assert keywords == set(keyword.kwlist)
    assert functions == PYTHON_OPERATORS | HIGHER_ORDER_OPERATORS
    assert denied == {name for name, verdict in listed_verdicts().items() if verdict == DENIED}
    assert set(re.findall(r"^\| `(\w+)` \| 2", SPEC, re.MULTILINE)) == shapes.OPERATIONS.keys()
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \| `(\w+)` \| (\d+) \|", SPEC, re.MULTILINE)
    assert {stored: int(size) for stored, _, size in rows} == dtypes.HEADER_ITEM_SIZE
    assert {name: stored for stored, name, _ in rows}.items() <= dtypes.HEADER_DTYPES.items()


def test_limits_are_those_of_the_code() -> None:
    stated = [
        int(number.replace(",", "")) for number in re.findall(r"^\| .* \| ([\d,]+) [bc]?.*\|$", SPEC, re.MULTILINE)
    ]
    for limit in (
        limits.MANIFEST_BYTES,
        limits.GRAPH_BYTES,
        limits.WEIGHT_HEADER_BYTES,
        limits.RANK,
        limits.EXPR_TERMS,
        limits.ONNX_BYTES,
        limits.ONNX_FIELDS,
        limits.UNFOLDED_ITEMS,
        limits.UNFOLDED_CHARACTERS,
        limits.SCHEMA_CHARACTERS,
    ):
        assert limit in stated
    assert limits.TENSOR_ELEMENTS == 2**62
    assert limits.TEMPLATE_CHARACTERS == 2048
    assert (limits.NESTING_DEPTH, limits.NAME_CHARACTERS, limits.STAGES) == (64, 1024, 4096)
    assert f"ONNX file MUST NOT be nested deeper than {limits.ONNX_DEPTH}" in SPEC.replace("\n", " ")


def test_the_example_shows_the_files() -> None:
    shown = dict(re.findall(r"```(?:json|hex) (\S+)\n(.*?)```", SPEC, re.DOTALL))
    weights = (TINY / "stage-0.safetensors").read_bytes()
    header = weights[8 : 8 + int.from_bytes(weights[:8], "little")]
    expected: dict[str, Any] = {
        "manifest.json": json.loads((TINY / "manifest.json").read_text()),
        "stage-0.msgpack": msgpack.unpackb((TINY / "stage-0.msgpack").read_bytes()),
        "stage-0.safetensors": json.loads(header),
    }
    for name, value in expected.items():
        assert json.dumps(json.loads(shown[name])) == json.dumps(value)
    assert bytes.fromhex(shown["stage-1.msgpack"]) == (TINY / "stage-1.msgpack").read_bytes()
    assert f"{len(header)}, so that the data begins at byte {8 + len(header)}" in SPEC
    assert f"{len(header) - len(header.rstrip())} spaces" in SPEC


@pytest.mark.process
def test_the_example_reads_without_stagepack() -> None:
    code = re.search(r"```python\n(.*?)```\n\nIt prints `(.*?)`", SPEC, re.DOTALL)
    assert code
    assert "stagepack" not in code[1]
    done = subprocess.run([sys.executable, "-I", "-c", code[1], str(TINY)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == code[2]
