"""A bundle is replaced by its next version in place: at any moment it is the old one or the new one."""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.errors import ExportWarning, OutputExistsError
from stagepack.format.output_file import siblings
from tests.deltas.conftest import Versions
from tests.deltas.test_roads import assert_same_folder

# Applies two deltas in turns, so that a kill may come at any moment of each.
APPLY = """
import sys, stagepack
path, *deltas = sys.argv[1:]
print("ready", flush=True)
while True:
    for delta in deltas:
        delta = stagepack.open_delta(delta)
        if delta.base == stagepack.open(path).digest:
            stagepack.apply_deltas(path, [delta], out=path, overwrite=True)
"""


def test_the_bundle_is_replaced_and_a_loaded_one_stays(versions: Versions, tmp_path: Path) -> None:
    path = Path(shutil.copytree(versions.a, tmp_path / "m.stagepack"))
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        running = stagepack.load(path)
        stagepack.apply_deltas(path, [versions.a_to_b, versions.b_to_c], out=path, overwrite=True)
        assert torch.equal(running(x), versions.model("a")(x))
        assert torch.equal(stagepack.load(path)(x), versions.model("c")(x))
    assert_same_folder(path, versions.c)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.stagepack"]


def test_files_of_others_stay(versions: Versions, tmp_path: Path) -> None:
    path = Path(shutil.copytree(versions.a, tmp_path / "m.stagepack"))
    (path / "notes.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"notes\.txt"):
        stagepack.apply_deltas(path, [versions.a_to_b], out=path, overwrite=True)
    assert (path / "notes.txt").read_text() == "mine"
    for folder in (versions.a_to_b, tmp_path):
        with pytest.raises(OutputExistsError, match="is not a bundle"):
            stagepack.apply_deltas(versions.a, [versions.a_to_b], out=folder, overwrite=True)
    with pytest.raises(OutputExistsError, match="is not a delta"):
        stagepack.delta(versions.a, versions.b, out=path, overwrite=True)


def test_an_old_signature_is_not_kept(versions: Versions, tmp_path: Path) -> None:
    path = Path(shutil.copytree(versions.a, tmp_path / "m.stagepack"))
    (path / "model.sig").write_text("{}")
    with pytest.warns(ExportWarning, match="was signed"):
        stagepack.apply_deltas(path, [versions.a_to_b], out=path, overwrite=True)
    assert not (path / "model.sig").exists()
    # That of the result is kept, if the delta has it.
    signed = Path(shutil.copytree(versions.c, tmp_path / "c.stagepack"))
    (signed / "model.sig").write_text('{"signature": "of c"}')
    delta = stagepack.delta(path, signed, out=tmp_path / "c.delta")
    stagepack.apply_deltas(path, [delta], out=path, overwrite=True)
    assert_same_folder(path, signed)


def kills(versions: Versions, tmp_path: Path, count: int) -> set[str]:
    """Kill a process that applies deltas, at drawn moments; return the digests that were found."""
    path = Path(shutil.copytree(versions.a, tmp_path / "m.stagepack"))
    back = stagepack.delta(versions.b, versions.a, out=tmp_path / "a.delta")
    expected = {stagepack.open(versions.a).digest, stagepack.open(versions.b).digest}
    draw = random.Random(0)  # noqa: S311 - moments, and no secrets
    found = set()
    for _ in range(count):
        command = [sys.executable, "-c", APPLY, str(path), str(versions.a_to_b), str(back.path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(draw.uniform(0.2, 1.0))
        process.send_signal(draw.choice([signal.SIGKILL, signal.SIGTERM]))
        process.wait()
        process.stdout.close()
        bundle = stagepack.open(path)
        bundle.verify(strict=True)
        found.add(bundle.digest)
    assert found <= expected
    # The next writer removes what killed ones have left.
    delta = versions.a_to_b if stagepack.open(path).digest == stagepack.open(versions.a).digest else back.path
    stagepack.apply_deltas(path, [delta], out=path, overwrite=True)
    assert not [*siblings(path, "part"), *siblings(path, "old")]
    return found


@pytest.mark.process
def test_a_killed_apply_leaves_the_old_bundle_or_the_new_one(versions: Versions, tmp_path: Path) -> None:
    assert kills(versions, tmp_path, 3)


@pytest.mark.process
@pytest.mark.slow
def test_many_kills(versions: Versions, tmp_path: Path) -> None:
    assert kills(versions, tmp_path, 40)


def test_a_link_is_not_replaced_and_the_folder_behind_it_is_named(versions: Versions, tmp_path: Path) -> None:
    path = Path(shutil.copytree(versions.a, tmp_path / "m.stagepack"))
    link = tmp_path / "link.stagepack"
    link.symlink_to("m.stagepack")
    for out in (link, f"{link}/"):
        with pytest.raises(
            OutputExistsError, match=rf"is a symbolic link to 'm\.stagepack'.*give the folder itself, {path}"
        ):
            stagepack.apply_deltas(link, [versions.a_to_b], out=out, overwrite=True)
    assert_same_folder(path, versions.a)
