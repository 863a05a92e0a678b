"""Whatever the bytes of a bundle are, reading them gives a result or a `StagepackError`, and nothing else."""

import contextlib
import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagepack.errors import FormatError, LimitError, StagepackError
from stagepack.format import graph_reader
from stagepack.format.codec import convert_manifest, encode_graph, parse_json
from stagepack.format.upgrade import check_version
from stagepack.format.validate import check_manifest, raise_problems
from stagepack.format.weights import read_weight_header
from tests.conformance.vectors import TINY, VECTORS

GRAPH = json.loads((VECTORS / "graph" / "base.json").read_text())
MANIFEST = json.loads((TINY / "manifest.json").read_text())
WEIGHTS = (TINY / "stage-0.safetensors").read_bytes()
HEADER = json.loads(WEIGHTS[8:256])

fuzz = settings(
    max_examples=400,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 64, 2**31, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 1e308, 0.5]),
    st.sampled_from(["", "x", "batch", "class", "../x", "float32", "symint", "é", "v" * 2000]),
    st.sampled_from([["value", "x"], ["list", []], ["what", 1], {"op": "pow", "args": ["batch", "batch"]}, {"a": 1}]),
    st.sampled_from([{"type": "value", "name": "x"}, {"type": "dict", "kind": "dict", "items": [[1, None]]}]),
)
wrappers = st.sampled_from(
    [
        lambda value: ["list", [value]],
        lambda value: ["dict", [["k", value]]],
        lambda value: {"op": "add", "args": [value, 1]},
        lambda value: {"type": "sequence", "kind": "list", "items": [value]},
        lambda value: [value],
    ]
)


@st.composite
def documents(draw: st.DrawFn, base: Any) -> Any:
    """A document with one to three places changed: a leaf, a removed or doubled item, an unknown field, or a deep nest."""
    document = json.loads(json.dumps(base))
    for _ in range(draw(st.integers(1, 3))):
        held = document
        while True:
            keys = list(held) if isinstance(held, dict) else list(range(len(held)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(held[key], dict | list) and draw(st.integers(0, 3)):
                held = held[key]
                continue
            change(draw, held, key)
            break
    return document


def change(draw: st.DrawFn, held: Any, key: Any) -> None:
    match draw(st.integers(0, 4)):
        case 0 | 1:
            held[key] = copy.deepcopy(draw(leaves))
        case 2:
            wrap, times = draw(wrappers), draw(st.sampled_from([3, 63, 64, 65, 120, 200]))
            for _ in range(times):
                held[key] = wrap(held[key])
        case 3:
            del held[key]
        case _ if isinstance(held, dict):
            held["unknown"] = copy.deepcopy(draw(leaves))
        case _:
            held.insert(key, copy.deepcopy(held[key]))


@st.composite
def damaged(draw: st.DrawFn, base: bytes) -> bytes:
    """Bytes with some changed, removed or added."""
    content = bytearray(base)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 9)))
        content[start:end] = draw(st.binary(max_size=6))
    return bytes(content)


def read_graph(content: bytes, newer: bool = False) -> None:
    file = graph_reader.read_graph(content, "graph", newer=newer)
    if not newer:
        assert encode_graph(file.folded) == content


def read_manifest(content: bytes) -> None:
    fields = parse_json(content, "manifest")
    check_version(fields, "manifest")
    raise_problems(check_manifest(convert_manifest(fields, "manifest")))


def only_our_errors(read: Callable[..., object], *given: Any) -> None:
    with contextlib.suppress(StagepackError):
        read(*given)


@fuzz
@given(documents(GRAPH), st.booleans())
def test_graphs_that_say_something_else(document: Any, newer: bool) -> None:
    only_our_errors(read_graph, msgpack.packb(document), newer)


@fuzz
@given(damaged(msgpack.packb(GRAPH)), st.booleans())
def test_damaged_graphs(content: bytes, newer: bool) -> None:
    only_our_errors(read_graph, content, newer)


@fuzz
@given(documents(MANIFEST), st.sampled_from(["1.0", "1.7"]))
def test_manifests_that_say_something_else(document: Any, version: str) -> None:
    if isinstance(document, dict) and "version" in document:
        document["version"] = version
    only_our_errors(read_manifest, json.dumps(document).encode())


@fuzz
@given(damaged((TINY / "manifest.json").read_bytes()))
def test_damaged_manifests(content: bytes) -> None:
    only_our_errors(read_manifest, content)


@fuzz
@given(document=documents(HEADER))
def test_headers_that_say_something_else(tmp_path: Path, document: Any) -> None:
    header = json.dumps(document).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + WEIGHTS[256:])
    only_our_errors(read_weight_header, path)


@fuzz
@given(content=damaged(WEIGHTS))
def test_damaged_weight_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    only_our_errors(read_weight_header, path)


@pytest.fixture
def own_limit() -> Iterator[None]:
    """Python's own limit of recursion, which libraries that ran before in this process may have raised."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("own_limit")
@pytest.mark.parametrize("depth", [100, 400, 1000, 100_000])
def test_no_depth_is_too_deep_for_an_error(depth: int) -> None:
    """Depths around Python's own limit: some decode, and must not break the checks after it."""
    lists = msgpack.packb(GRAPH).replace(msgpack.packb(["value", "w0"]), b"\x92\xa4list\x91" * depth + b"\xc0", 1)
    with pytest.raises(LimitError, match="L2"):
        read_graph(lists)
    tree = b'{"type":"sequence","kind":"list","items":[' * depth + b'{"type":"constant","value":null}' + b"]}" * depth
    manifest = (
        json.dumps(
            MANIFEST
            | {"entry_points": [MANIFEST["entry_points"][0] | {"signature": {"parameters": [], "result": "@"}}]}
        )
        .encode()
        .replace(b'"@"', tree)
    )
    with pytest.raises(LimitError, match="L2"):
        read_manifest(manifest)
    unknown = json.dumps(MANIFEST | {"version": "@"}).encode().replace(b'"@"', b"[" * depth + b"]" * depth)
    with pytest.raises(FormatError, match="M2" if depth < 900 else "L2"):
        read_manifest(unknown)


@pytest.mark.parametrize("fields", [None, 1, "x", [], {}, {"version": {}}, {"version": "1.0", "features": [{}, [], 1]}])
def test_any_json_has_no_version(fields: Any) -> None:
    with pytest.raises(FormatError, match=r"\[M[23]\]"):
        check_version(fields, "manifest")
    with pytest.raises(FormatError, match=r"\[E3\]"):
        convert_manifest(fields, "manifest")


def test_very_many_problems_make_a_short_error() -> None:
    content = msgpack.packb({"nodes": [{"op": 9}] * 5000})
    with pytest.raises(FormatError) as caught:
        read_graph(content)
    assert len(caught.value.problems) == 1000
    assert len(str(caught.value)) < 3000
