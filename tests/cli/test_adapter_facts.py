"""`stagepack inspect` and `stagepack diff` say what adapters change, and what differs between two of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import stagepack
from stagepack.adapter.compare import compare_adapters
from stagepack.cli import main
from tests.adapters.lora import write_tiny_adapter
from tests.bundle_editor import BundleEditor

REPLACED = {"layer.bias": torch.tensor([1.0, 2.0, 3.0])}
BIAS = {"layer.lora_B.bias": torch.ones(3)}


def run(*arguments: str | Path, status: int = 0) -> str:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == status, done.output
    return done.output


def test_inspect_shows_what_an_adapter_changes(tmp_path: Path) -> None:
    adapter = write_tiny_adapter(tmp_path / "a", replaced=REPLACED | BIAS)
    opened = stagepack.open_adapter(adapter)
    facts = json.loads(run("inspect", adapter, "--json"))
    assert facts["changes"] == [
        {"module": "layer", "weight": "layer.weight", "rank": 2, "in": 2, "out": 3, "scale": 4.0, "bias": True}
    ]
    assert facts["replaced"] == {"layer.bias": [3]}
    assert (facts["digest"], facts["base"]) == (opened.digest, opened.base)
    text = run("inspect", adapter)
    assert f"base: {opened.base}" in text
    assert "low-rank, with a bias" in text
    assert "replaced by [3]" in text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"seed": 1}, {"layer": "other values"}),
        ({"rank": 4}, {"layer": "rank 2 and 4, scale 4 and 2"}),
        ({"lora_alpha": 2}, {"layer": "scale 4 and 1"}),
        ({"lora_alpha": 2, "seed": 1}, {"layer": "scale 4 and 1, other values"}),
        ({"replaced": BIAS}, {"layer": "bias only in B"}),
        ({"replaced": REPLACED}, {"layer.bias": "replaced: only in B"}),
    ],
)
def test_diff_shows_what_differs(options: dict[str, Any], expected: dict[str, str], tmp_path: Path) -> None:
    first, second = write_tiny_adapter(tmp_path / "a"), write_tiny_adapter(tmp_path / "b", **options)
    status = 1 if expected else 0
    facts = json.loads(run("diff", first, second, "--json", status=status))
    assert facts == {"equal": not expected, "base": [], "weights": expected, "files": []}
    text = run("diff", first, second, status=status)
    assert all(difference in text for difference in (expected.values() or ["equal"]))


def test_adapters_of_two_bases_differ(tmp_path: Path) -> None:
    first = write_tiny_adapter(tmp_path / "a")
    editor = BundleEditor.copy(first, tmp_path / "b")
    editor.write_manifest(editor.manifest() | {"base": "1" * 64})
    found = compare_adapters(stagepack.open_adapter(first), stagepack.open_adapter(editor.path))
    assert (found.weights, found.files) == ({}, ())
    assert found.base == (f"{stagepack.open_adapter(first).base} and {'1' * 64}",)
    assert "base:\n" in run("diff", first, editor.path, status=1)


def test_adapters_of_two_digests_are_never_equal(tmp_path: Path) -> None:
    first = write_tiny_adapter(tmp_path / "a")
    editor = BundleEditor(Path(shutil.copytree(first, tmp_path / "b")))
    editor.edit_weight_header(
        "adapter.safetensors", lambda fields: fields.update({"__metadata__": {"made": "by hand"}})
    )
    found = compare_adapters(stagepack.open_adapter(first), stagepack.open_adapter(editor.path))
    assert (found.base, found.weights, found.files) == ((), {}, ("the same changes, stored otherwise",))
