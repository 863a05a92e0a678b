"""However deep a content is nested, and however much of it is wrong: a `StagepackError`, and a short one."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from stagepack.errors import FormatError, LimitError
from stagepack.format.graph_codec import read_graph
from stagepack.format.manifest_codec import BUNDLE, convert_document
from stagepack.format.rules import parse_json, raise_problems
from stagepack.format.upgrade import check_version
from stagepack.format.validate.manifest_rules import check_manifest
from tests.conformance.vectors import TINY, VECTORS

GRAPH = json.loads((VECTORS / "graph" / "base.json").read_text())
MANIFEST = json.loads((TINY / "manifest.json").read_text())


def read_manifest(content: bytes) -> None:
    fields = parse_json(content, "manifest")
    check_version(fields, "manifest")
    raise_problems(check_manifest(convert_document(fields, BUNDLE)))


@pytest.fixture
def own_limit() -> Iterator[None]:
    """Python's own limit of recursion, which libraries that ran before in this process may have raised."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("own_limit")
@pytest.mark.parametrize("depth", [100, 400, 1000, 1490, 5000, 9990, 100_000])
def test_no_depth_is_too_deep_for_an_error(depth: int) -> None:
    """Depths around the limits of Python: some decode, and must not break the checks after it.

    In Python 3.12 and newer, code in C has a limit of its own, which the recursion limit does not set: 1500 to 10000 calls.
    """
    lists = msgpack.packb(GRAPH).replace(msgpack.packb(["value", "w0"]), b"\x92\xa4list\x91" * depth + b"\xc0", 1)
    with pytest.raises(LimitError, match="L2"):
        read_graph(lists, "graph")
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
    rule = "M2" if depth < 900 else "L2" if depth > 10_000 or sys.version_info < (3, 12) else "M2|L2"
    with pytest.raises(FormatError, match=rule):
        read_manifest(unknown)


@pytest.mark.parametrize("fields", [None, 1, "x", [], {}, {"version": {}}, {"version": "1.0", "features": [{}, [], 1]}])
def test_any_json_has_no_version(fields: Any) -> None:
    with pytest.raises(FormatError, match=r"\[M[23]\]"):
        check_version(fields, "manifest")
    with pytest.raises(FormatError, match=r"\[E3\]"):
        convert_document(fields, BUNDLE)


def test_very_many_problems_make_a_short_error() -> None:
    content = msgpack.packb({"nodes": [{"op": 9}] * 5000})
    with pytest.raises(FormatError) as caught:
        read_graph(content, "graph")
    assert len(caught.value.problems) == 1000
    assert len(str(caught.value)) < 3000
