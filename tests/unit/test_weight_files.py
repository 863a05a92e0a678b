"""Weights on the CPU: mapped by default, copied on request. `tests/serve/test_served_bundles.py` changes files that are mapped."""

import shutil
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.errors import DigestError
from stagepack_loaders.base import Loading
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.weight_files import open_weight_files
from tests.bundle_editor import BundleEditor
from tools.fork_server import run_forked

SIZE = 1024

# Loads copies of all stages of a bundle in a runtime, empties their files, and replays the example. A stage with state begins anew.
CUT_EXAMPLE_SHORT = """
import os, sys
import stagepack
from stagepack_loaders.example import replay_example
bundle = stagepack.open(sys.argv[1])
pipeline = stagepack.load(bundle, runtime=sys.argv[2], copy=True)
for stage in bundle.stages:
    for name in (*stage.weights, *stage.onnx.weights):
        os.truncate(bundle.path / name, 0)
for _ in range(2):
    assert replay_example(pipeline).largest == 0.0
    pipeline.reset_state()
"""
TOWER = Path(__file__).parents[2] / "schema" / "frozen" / "1.0" / "tower.stagepack"


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with 8 MiB of weights."""
    path = tmp_path_factory.mktemp("weights") / "linear.stagepack"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE))
    stagepack.export(model, (torch.ones(1, SIZE),), out=path)
    return path


@pytest.mark.process
@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_a_copy_in_any_runtime_needs_no_file(runtime: str, tmp_path: Path) -> None:
    path = tmp_path / "m.stagepack"
    shutil.copytree(TOWER, path)
    (script := tmp_path / "script.py").write_text(CUT_EXAMPLE_SHORT)
    found = run_forked(str(path), runtime, script=script)
    assert found.returncode == 0, (found.returncode, found.stderr)


def test_copies_and_maps_hold_the_same_bytes_and_neither_writes_to_the_file(linear: Path) -> None:
    bundle = stagepack.open(linear)
    before = (linear / "stage-0.safetensors").read_bytes()
    for copy in (False, True):
        file = open_weight_files(bundle, ["stage-0.safetensors"], Loading(options=LoadOptions(copy=copy)), verify=True)[
            "stage-0.safetensors"
        ]
        assert file.content[:] == before
        stage = stagepack.load_stage(linear, 0, copy=copy)
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.zero_()
    assert (linear / "stage-0.safetensors").read_bytes() == before
    bundle.verify()


def test_a_copy_is_not_used_if_a_chunk_is_wrong(linear: Path, tmp_path: Path) -> None:
    editor = BundleEditor.copy(linear, tmp_path / "m.stagepack")
    editor.flip_bit("stage-0.safetensors", 5_000_000)
    bundle = stagepack.open(editor.path)
    for copy in (False, True):
        with pytest.raises(DigestError, match=r"stage-0\.safetensors: the content was changed"):
            open_weight_files(bundle, ["stage-0.safetensors"], Loading(options=LoadOptions(copy=copy)), verify=True)
        open_weight_files(bundle, ["stage-0.safetensors"], Loading(options=LoadOptions(copy=copy)), verify=False)


def test_progress_counts_the_bytes_that_are_read(linear: Path) -> None:
    bundle = stagepack.open(linear)
    counts: list[int] = []
    open_weight_files(
        bundle, ["stage-0.safetensors"], Loading(options=LoadOptions(copy=True), progress=counts.append), verify=True
    )
    assert sum(counts) == bundle.files["stage-0.safetensors"].size
    bundle.verify(counts.append)
    assert sum(counts) > 2 * bundle.files["stage-0.safetensors"].size
