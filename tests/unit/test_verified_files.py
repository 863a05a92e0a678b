"""A mapped weight file is hashed once: again when it has changed in any way, and always where the record could not be trusted."""

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.errors import DigestError
from stagepack_loaders import weight_files
from stagepack_loaders.base import Loading
from stagepack_loaders.mounts import is_of_kind
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.weight_files import open_weight_files

NAME = "stage-0.safetensors"
IS_TRUSTED = is_of_kind(Path(tempfile.gettempdir()).stat().st_dev, weight_files._FILE_SYSTEMS)


@pytest.fixture(scope="module")
def sound_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "m.stagepack"
    stagepack.export(torch.nn.Linear(64, 64), (torch.ones(1, 64),), out=path)
    return path


@pytest.fixture
def bundle(sound_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of its own, a record of its own, and a file system that is trusted, whatever it is."""
    monkeypatch.setenv(weight_files.VERIFIED_FILES_VARIABLE, str(tmp_path / "record"))
    monkeypatch.setattr(weight_files, "is_of_kind", lambda device, kinds: True)
    monkeypatch.setattr(weight_files, "_SETTLED_SECONDS", 0.0)
    shutil.copytree(sound_bundle, tmp_path / "m.stagepack")
    (tmp_path / "m.stagepack" / NAME).chmod(0o644)
    return tmp_path / "m.stagepack"


def compared_bytes(path: Path, *, copy: bool = False) -> int:
    """The number of bytes of the weight file that loading reads."""
    counts = [0]
    open_weight_files(
        stagepack.open(path), [NAME], Loading(options=LoadOptions(copy=copy), progress=counts.append), verify=True
    )
    return sum(counts)


def test_a_mapped_file_is_compared_once_and_a_copy_always(bundle: Path) -> None:
    size = (bundle / NAME).stat().st_size
    assert compared_bytes(bundle) == size
    assert compared_bytes(bundle) == 0
    unchanged: list[int] = []
    open_weight_files(stagepack.open(bundle), [NAME], Loading(unchanged=unchanged.append), verify=True)
    assert unchanged == [size]
    assert compared_bytes(bundle, copy=True) == size
    # Verifying a bundle never relies on the record.
    counts: list[int] = []
    stagepack.open(bundle).verify(counts.append)
    assert sum(counts) > size


def write_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xaa")


def write_through_a_map(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        content[-1] ^= 1


def replace(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1] + b"\xaa")


@pytest.mark.parametrize("change", [write_a_byte, write_through_a_map, replace])
def test_a_change_is_seen_though_size_and_time_are_those_of_before(
    change: Callable[[Path], None], bundle: Path
) -> None:
    path = bundle / NAME
    before = path.stat()
    compared_bytes(bundle)
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    for _ in range(2):
        with pytest.raises(DigestError, match="the content was changed"):
            compared_bytes(bundle)


@pytest.mark.skipif(not IS_TRUSTED, reason="the file system of the temporary folder is none that the record relies on")
def test_a_map_that_was_written_before_the_comparison_cannot_be_used_after_it_unseen(bundle: Path) -> None:
    """The page is dirty already when the file is compared, so that only writing it back makes the next write visible."""
    path = bundle / NAME
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        last_byte = content[-1]
        content[-1] = last_byte
        compared_bytes(bundle)
        content[-1] = last_byte ^ 1
        with pytest.raises(DigestError, match="the content was changed"):
            compared_bytes(bundle)


def test_a_file_waits_for_the_disk_only_where_it_can_be_recorded(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronized: list[int] = []
    monkeypatch.setattr(os, "fsync", synchronized.append)
    with monkeypatch.context() as patch:
        patch.setattr(weight_files, "_SETTLED_SECONDS", 60.0)
        compared_bytes(bundle)
        assert not synchronized
    compared_bytes(bundle)
    assert len(synchronized) == 1


def test_nothing_is_recorded_that_others_could_change(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (bundle / NAME).stat().st_size
    (bundle / NAME).chmod(0o664)
    assert [compared_bytes(bundle) for _ in range(2)] == [size, size]
    (bundle / NAME).chmod(0o644)
    changes: list[Callable[[pytest.MonkeyPatch], None]] = [
        lambda patch: patch.setattr(weight_files, "is_of_kind", lambda device, kinds: False),
        lambda patch: patch.setattr(weight_files, "_SETTLED_SECONDS", 60.0),
        lambda patch: patch.setenv(weight_files.VERIFIED_FILES_VARIABLE, ""),
    ]
    for change in changes:
        with monkeypatch.context() as patch:
            change(patch)
            assert [compared_bytes(bundle) for _ in range(2)] == [size, size]


def test_a_record_that_others_could_write_or_of_an_earlier_start_is_not_used(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (bundle / NAME).stat().st_size
    assert compared_bytes(bundle) == size
    (tmp_path / "record" / "verified").chmod(0o777)
    assert compared_bytes(bundle) == size
    (tmp_path / "record" / "verified").chmod(0o700)
    assert compared_bytes(bundle) == 0
    (tmp_path / "boot_id").write_text("another-start\n")
    monkeypatch.setattr(weight_files, "_BOOT_ID_PATH", tmp_path / "boot_id")
    assert [compared_bytes(bundle) for _ in range(2)] == [size, 0]


def test_records_of_earlier_starts_are_removed_after_a_month_and_nothing_else(bundle: Path, tmp_path: Path) -> None:
    records = tmp_path / "record" / "verified"
    records.mkdir(parents=True, mode=0o700)
    old_times = (time.time() - 40 * 86_400,) * 2
    names = ["0f0f0f0f-0f0f-0f0f-0f0f-0f0f0f0f0f0f", "1f0f0f0f-0f0f-0f0f-0f0f-0f0f0f0f0f0f", "datasets"]
    for name in names:
        (records / name).mkdir()
        (records / name / "file").touch()
    for name in (names[0], names[2]):
        os.utime(records / name, old_times)
    compared_bytes(bundle)
    assert {path.name for path in records.iterdir()} >= set(names[1:])
    assert not (records / names[0]).exists()
