"""Files that users pass beside a bundle, and the assets in it, raise typed errors whatever is in them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stagepack
from stagepack.capture.checkpoint import checkpoint_file_tensors
from stagepack.errors import CaptureError, StagepackError
from stagepack.partition.cut_options import read_plan
from stagepack.partition.profile import read_profile
from stagepack_loaders.run_trace import read_trace
from stagepack_text.server.text_stream import read_text_format
from stagepack_text.settings import read_settings
from tests.bundle_editor import BundleEditor
from tests.conformance.vectors import TINY

DEPTH = 100_000
NO_JSON = [
    b"",
    b"\xff",
    b'{"\xff": 1}',
    b'{"a": "\xf0\x28\x8c\x28"}',
    b"[" * DEPTH,
    b'{"a": %b%b}' % (b"[" * DEPTH, b"]" * DEPTH),
]
READERS: dict[str, Callable[[Path], object]] = {"plan": read_plan, "profile": read_profile, "trace": read_trace}
ASSETS = {
    "generation_config.json": [
        b'{"eos_token_id": 1.5}',
        b'{"eos_token_id": ["a"]}',
        b'{"max_length": 1%b}' % (b"0" * 400),
    ],
    "tokenizer.json": [],
    "tokenizer_config.json": [],
}
TOKENIZER = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}


@pytest.mark.parametrize("content", NO_JSON, ids=lambda content: repr(content[:12]))
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_no_json_is_refused(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(StagepackError, match=f"expected a {name}"):
        READERS[name](tmp_path / "file")


@pytest.mark.parametrize("name", ASSETS)
def test_an_asset_that_is_damaged_is_refused(name: str, tmp_path: Path) -> None:
    editor = BundleEditor.copy(TINY, tmp_path / "tiny.stagepack")
    editor.write_file("tokenizer.json", json.dumps(TOKENIZER).encode())
    for content in (*NO_JSON, *ASSETS[name]):
        editor.write_file(name, content)
        bundle = stagepack.open(editor.path)
        with pytest.raises(StagepackError, match=name):
            (read_settings if name == "generation_config.json" else read_text_format)(bundle)


def test_a_chat_template_may_have_any_name(tmp_path: Path) -> None:
    editor = BundleEditor.copy(TINY, tmp_path / "tiny.stagepack")
    editor.write_file("tokenizer.json", json.dumps(TOKENIZER).encode())
    for templates, has_template in (
        ([{"name": [1], "template": "x"}], False),
        ([{"name": "default", "template": "x"}], True),
    ):
        editor.write_file("tokenizer_config.json", json.dumps({"chat_template": templates}).encode())
        text_format = read_text_format(stagepack.open(editor.path))
        assert text_format is not None
        assert (text_format.chat_template is not None) == has_template


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [-2, -1]},
        {"shape": [True, 2]},
        {"shape": [2.0]},
        {"data_offsets": [0.0, 8.0]},
        {"data_offsets": [-8, 0]},
        {"data_offsets": [64, 72]},
        {"shape": [2**62, 2**62, 0], "data_offsets": [0, 0]},
        {"dtype": ["F32"]},
    ],
    ids=str,
)
def test_a_checkpoint_with_impossible_tensors_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    header = json.dumps({"a": ENTRY | change}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CaptureError, match="cannot be read as a safetensors file"):
        checkpoint_file_tensors(path)
