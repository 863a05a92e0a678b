"""Wrong requests to an open bundle are typed errors that tell what the bundle has."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagepack.errors import FileNotListedError, LimitError, StagepackError
from stagepack.format.graph import Graph
from stagepack.format.graph_codec import read_graph
from stagepack.format.reader import Bundle
from stagepack.format.weights import parse_weight_header
from tests.bundle_editor import BundleEditor
from tests.conformance.vectors import TINY


@pytest.mark.parametrize("stage_number", [-1, 2, 99])
@pytest.mark.parametrize(
    "read",
    [
        Bundle.stage,
        Bundle.graph,
        Bundle.graph_file,
        Bundle.onnx_file,
        lambda bundle, stage_number: bundle.tensors(stage_number, Graph()),
    ],
    ids=["stage", "graph", "graph_file", "onnx_file", "tensors"],
)
def test_a_wrong_stage_number_is_an_index_error(read: Callable[[Bundle, int], object], stage_number: int) -> None:
    with pytest.raises(IndexError, match=f"expected a stage from 0 to 1, found {stage_number}$"):
        read(Bundle(TINY), stage_number)


@pytest.mark.parametrize("file_name", ["x", "", "../tiny.stagepack/stage-0.msgpack", "manifest.json"])
def test_a_file_that_is_not_listed_is_refused_with_the_files_that_are(file_name: str) -> None:
    bundle = Bundle(TINY)
    listed = "stage-0.msgpack, stage-0.safetensors, stage-1.msgpack"
    expected = re.escape(f"{TINY}: expected one of the files {listed}, found {file_name!r}")
    assert issubclass(FileNotListedError, StagepackError)
    with pytest.raises(FileNotListedError, match=f"^{expected}$"):
        bundle.read(file_name)
    with pytest.raises(FileNotListedError, match=f"^{expected}$"):
        bundle.check_digests([file_name])


def test_a_stage_without_an_onnx_model_is_refused() -> None:
    with pytest.raises(FileNotListedError, match=r"stage 1 has no ONNX model: add it with stagepack.add_onnx"):
        Bundle(TINY).onnx_file(1)


def test_a_file_over_the_limit_of_the_caller_is_refused() -> None:
    with pytest.raises(LimitError, match=r"stage-0.msgpack: expected at most 500 bytes, found 558 \[L1\]"):
        Bundle(TINY).read("stage-0.msgpack", max_bytes=500)


def test_files_that_entry_points_share_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = BundleEditor.copy(TINY, tmp_path / "tiny.stagepack")

    def repeat(fields: dict[str, Any]) -> None:
        [entry_point] = fields["entry_points"]
        fields["entry_points"] = [entry_point | {"name": name} for name in ("first", "second", "third")]

    editor.edit_manifest(repeat)
    read: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def parse(content: object, file_name: str, **options: Any) -> Any:
            read.append(file_name)
            return function(content, file_name, **options)

        return parse

    monkeypatch.setattr("stagepack.format.graph_codec.read_graph", counted(read_graph))
    monkeypatch.setattr("stagepack.format.listed_files.parse_weight_header", counted(parse_weight_header))
    Bundle(editor.path).verify()
    assert sorted(read) == ["stage-0.msgpack", "stage-0.safetensors", "stage-1.msgpack"]
