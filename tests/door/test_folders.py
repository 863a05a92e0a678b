"""Folders as other tools leave them: links of caches and mounts, and files beside those of the bundle."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.errors import OutputExistsError
from stagepack.graph.rows.batch_dimension import end_edges
from stagepack_loaders.batching import batch_limit
from tests.distributed.forked_processes import forked_launches
from tests.door.model import EXAMPLE, Scale
from tests.hostile.attack import run


def hub_cache(source: Path, folder: Path, name: str = "m") -> Path:
    """The layout of ``hf download``: https://huggingface.co/docs/huggingface_hub/guides/manage-cache."""
    model_folder = folder / f"models--me--{name}"
    snapshot = model_folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (model_folder / "blobs").mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, model_folder / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    (snapshot / "README.md").write_text("# A model")
    (snapshot / ".gitattributes").write_text("*.safetensors filter=lfs")
    return snapshot


def config_map(source: Path, folder: Path) -> Path:
    """The layout of a mounted config map: each file is a link through ``..data``, a link to a folder with a time."""
    mount = folder / "mount"
    shutil.copytree(source, mount / "..2026_11_26_00_00_00.1")
    (mount / "..data").symlink_to("..2026_11_26_00_00_00.1")
    for file in source.iterdir():
        (mount / file.name).symlink_to(f"..data/{file.name}")
    return mount


def content_store(source: Path, folder: Path) -> Path:
    """The layout of DVC and Nix: absolute links to files that nobody may write."""
    store, linked = folder / "store", folder / "m.stagepack"
    shutil.copytree(source, store)
    linked.mkdir()
    for file in store.iterdir():
        file.chmod(0o444)
        (linked / file.name).symlink_to(file)
    return linked


def clone(source: Path, folder: Path) -> Path:
    path = Path(shutil.copytree(source, folder / "m.stagepack"))
    subprocess.run(["git", "init", "--quiet", path], check=True)
    for name in ("README.md", "LICENSE", ".gitattributes", ".DS_Store"):
        (path / name).touch()
    return path


LAYOUTS = [hub_cache, config_map, content_store, clone]


@pytest.mark.process
@pytest.mark.parametrize("make", LAYOUTS)
def test_a_folder_of_links_or_with_other_files_is_a_bundle(
    make: Callable[[Path, Path], Path], exported: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    source, expected = exported
    path = make(source, tmp_path)
    assert stagepack.open(path).digest == stagepack.open(source).digest
    stagepack.verify(path)
    assert run("verify", str(path), "--run").exit_code == 0
    for options in ({}, {"verify": "off"}, {"stream": True}):
        assert torch.equal(stagepack.load(path, **options)(EXAMPLE), expected), options
    with forked_launches(), stagepack.load(path, processes=True) as pipe:
        assert torch.equal(pipe(EXAMPLE), expected)
    in_onnx = stagepack.load(path, runtime="onnxruntime")
    assert torch.allclose(torch.as_tensor(in_onnx(EXAMPLE)), expected, atol=1e-5)
    recut = stagepack.recut(path, out=tmp_path / "recut.stagepack", stages=1)
    assert not any(file.is_symlink() for file in recut.path.iterdir())
    assert torch.equal(stagepack.load(recut)(EXAMPLE), expected)


@pytest.mark.parametrize("make", LAYOUTS)
def test_a_change_behind_a_link_is_found(
    make: Callable[[Path, Path], Path], exported: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    path = make(exported[0], tmp_path)
    weights = Path(os.path.realpath(path / "stage-1.safetensors"))
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    for road in (stagepack.verify, stagepack.load):
        with pytest.raises(stagepack.errors.DigestError, match=r"stage-1.safetensors: .* \[D2\]"):
            road(path)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_repository_is_not_lost_when_its_bundle_is_written_again(
    is_damaged: bool, exported: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    path = clone(exported[0], tmp_path)
    if is_damaged:
        os.truncate(path / "manifest.json", 40)
    with pytest.raises(OutputExistsError, match=r"would be lost: \.DS_Store, \.git, \.gitattributes[,:]"):
        stagepack.export(Scale(), (EXAMPLE,), out=path, overwrite=True)
    assert (path / ".git" / "HEAD").is_file()


def test_a_host_with_the_files_of_its_stage_alone_batches_nothing(tmp_path: Path) -> None:
    shapes = {"x": {0: torch.export.Dim("batch", min=1, max=8)}}
    bundle = stagepack.export(Scale(), (EXAMPLE,), out=tmp_path / "m.stagepack", stages=2, dynamic_shapes=shapes)
    assert batch_limit(bundle, end_edges(bundle), 8, None).max_batch_size == 8
    (bundle.path / "stage-1.msgpack").unlink()
    limit = batch_limit(stagepack.open(bundle.path), end_edges(bundle), 8, None)
    assert (limit.max_batch_size, "has not the graphs of all stages" in limit.reason) == (1, True)
