"""What a pull takes from this machine, keeps when it is interrupted, and leaves on a full disk."""

import gc
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import stagepack
from stagepack.cli import main
from stagepack.remote import download
from tests.remote.http_server import HttpServer, Reply

CHUNK_BYTES = 2**24


def pull(server: HttpServer, name: str, out: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["pull", f"{server.url}/{name}.stagepack", "-o", str(out), *options])


def sent_bytes(server: HttpServer) -> int:
    """How many bytes were sent since this was asked, less manifests and signatures."""
    count = sum(server.sent.values()) - server.sent["manifest.json"] - server.sent["model.sig"]
    server.sent.clear()
    return count


def size_of(folder: Path) -> int:
    return sum(file.size for file in stagepack.open(folder).manifest.files)


def export_version(folder: Path, number: int) -> Path:
    """A version of a model of 53 MB in 4 chunks, of which only the last one differs from that of another version."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(2600, 5090).eval()
    torch.nn.init.constant_(model.bias, number)
    return stagepack.export(model, (torch.ones(1, 2600),), out=folder / f"v{number}.stagepack", stages=1).path


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("versions")
    for number in range(3):
        export_version(folder, number)
    return folder


@pytest.fixture
def server(versions: Path, cache: Path) -> Iterator[HttpServer]:
    with HttpServer(versions) as http_server:
        yield http_server


def fail_after(byte_count: int) -> Callable[[str, int, Reply], None]:
    """Send so many bytes of each answer for weights, and then nothing."""

    def misbehave(name: str, index: int, reply: Reply) -> None:
        if name.endswith(".safetensors") and index < 4:
            reply.sent_bytes = byte_count
        elif name.endswith(".safetensors"):
            reply.body, reply.status, reply.headers = b"", 403, {"Content-Length": "0"}

    return misbehave


@pytest.mark.parametrize("where", ["replaced", "beside", "cache"])
def test_only_changed_chunks_travel(where: str, server: HttpServer, versions: Path, tmp_path: Path) -> None:
    out = tmp_path / "models" / "2"
    if where == "cache":
        stagepack.open(f"{server.url}/v0.stagepack").verify()
    else:
        assert pull(server, "v0", out if where == "replaced" else tmp_path / "models" / "1").exit_code == 0
    assert sent_bytes(server) >= size_of(versions / "v0.stagepack")
    result = pull(server, "v1", out, "--overwrite")
    assert result.exit_code == 0, result.output
    assert stagepack.open(out).digest == stagepack.open(versions / "v1.stagepack").digest
    stagepack.verify(out)
    # The last chunk of the weights, the example, and what is small.
    assert sent_bytes(server) < size_of(versions / "v0.stagepack") - 3 * CHUNK_BYTES + 100_000
    assert [path.name for path in out.parent.glob(".*")] == []


def test_a_bundle_at_a_url_takes_chunks_of_its_former_version(server: HttpServer, versions: Path) -> None:
    stagepack.open(f"{server.url}/v0.stagepack").verify()
    sent_bytes(server)
    stagepack.open(f"{server.url}/v1.stagepack").verify()
    assert sent_bytes(server) < size_of(versions / "v0.stagepack") - 3 * CHUNK_BYTES + 100_000


def test_chunks_of_a_bundle_beside_it_are_not_believed(server: HttpServer, versions: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(versions / "v0.stagepack", tmp_path / "other.stagepack"))
    weights = other / "stage-0.safetensors"
    content = bytearray(weights.read_bytes())
    content[CHUNK_BYTES + 5] ^= 1
    weights.write_bytes(content)
    (tmp_path / "broken.stagepack").mkdir()
    (tmp_path / "broken.stagepack" / "manifest.json").write_text('{"format": "stagepack"')
    (tmp_path / "looped").symlink_to("looped")
    assert pull(server, "v0", tmp_path / "out").exit_code == 0
    stagepack.verify(tmp_path / "out")
    assert CHUNK_BYTES <= sent_bytes(server) < CHUNK_BYTES + 100_000
    assert weights.read_bytes() == content


@pytest.mark.parametrize("is_damaged", [False, True], ids=["as it was", "with wrong bytes"])
def test_an_interrupted_download_goes_on_within_a_chunk(
    is_damaged: bool, server: HttpServer, versions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_WRITE_SECONDS", 0.0)
    out, parts_folder = tmp_path / "out", tmp_path / ".out.download" / "files"
    with HttpServer(versions, fail_after(4_000_000)) as failing_server:
        assert "credentials" in pull(failing_server, "v0", out).output
    kept = sum(path.stat().st_blocks * 512 for path in parts_folder.iterdir())
    assert kept > 3_000_000
    for part in parts_folder.glob("*.part") if is_damaged else ():
        with part.open("r+b") as file:
            file.write(b"\xff" * 1000)
    assert pull(server, "v0", out).exit_code == 0
    stagepack.verify(out)
    if not is_damaged:  # the last block of each chunk that was under way may not be filled
        assert sent_bytes(server) <= size_of(out) - kept + 4 * 2**17


def test_left_overs_of_several_versions_do_not_grow(
    server: HttpServer, versions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_WRITE_SECONDS", 0.0)
    for number in range(3):
        with HttpServer(versions, fail_after(4_000_000)) as failing_server:
            assert pull(failing_server, f"v{number}", tmp_path / "out").exit_code == 1
        gc.collect()  # a bundle is locked until the error that names it is gone
    folder = tmp_path / ".out.download"
    assert len(list((folder / "bundles").iterdir())) == 2
    assert pull(server, "v2", tmp_path / "out").exit_code == 0
    assert sent_bytes(server) < size_of(versions / "v2.stagepack") - 3_000_000
    assert os.listdir(tmp_path) == ["out"]


def test_a_pull_that_finds_no_bundle_leaves_nothing(server: HttpServer, tmp_path: Path) -> None:
    assert "there is no manifest.json" in pull(server, "absent", tmp_path / "out").output
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.process
def test_a_killed_pull_keeps_what_has_come(server: HttpServer, versions: Path, tmp_path: Path) -> None:
    """At 13 MB/s over 4 connections; before, a kill after 40 MB lost all."""

    def limit_rate(_name: str, _index: int, reply: Reply) -> None:
        reply.piece_bytes, reply.pause_seconds = 2**16, 0.02

    server.misbehave = limit_rate
    total, out = size_of(versions / "v0.stagepack"), tmp_path / "out"
    command = [sys.executable, "-m", "stagepack", "pull", f"{server.url}/v0.stagepack", "-o", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while sum(server.sent.values()) < 30_000_000:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    time.sleep(0.5)
    first = sent_bytes(server)
    server.misbehave = lambda _name, _index, _reply: None
    assert pull(server, "v0", out).exit_code == 0
    stagepack.verify(out)
    kept = total - sent_bytes(server)
    assert kept > first - 20_000_000, (kept, first)
    assert os.listdir(tmp_path) == ["out"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 60 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=60m", "none", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small disk needs the right to mount, which this user does not have")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.process
@pytest.mark.parametrize("is_first", [True, False])
def test_a_full_disk_is_left_as_it_was(is_first: bool, server: HttpServer, versions: Path, disk: Path) -> None:
    """The disk fills up during the download, which began with enough space."""
    if not is_first:
        with HttpServer(versions, fail_after(4_000_000)) as failing_server:
            assert pull(failing_server, "v0", disk / "out").exit_code == 1

    def fill(name: str, _index: int, _reply: Reply) -> None:
        if name.endswith(".safetensors") and not (disk / "others").exists():
            (disk / "others").write_bytes(bytes(30_000_000))

    server.misbehave = fill
    result = pull(server, "v0", disk / "out")
    assert result.exit_code == 1
    says = (
        f"stagepack: {re.escape(str(disk / 'out'))}: could not be written: No space left on device: the bundle needs 5.* MB, and .* MB are "
        "free, now that what was downloaded is removed: free more, or choose an output on another disk\n"
    )
    assert re.fullmatch(says, result.stderr)
    assert os.listdir(disk) == ["others"]
    (disk / "others").unlink()
    server.misbehave = lambda _name, _index, _reply: None
    assert pull(server, "v0", disk / "out").exit_code == 0


@pytest.mark.process
def test_a_disk_that_is_too_small_is_said_before_the_download(server: HttpServer, disk: Path) -> None:
    (disk / "others").write_bytes(bytes(30_000_000))
    result = pull(server, "v0", disk / "out")
    assert "the download needs 5" in result.stderr
    assert "MB are free: free more ('stagepack cache' can), or choose another output\n" in result.stderr
    assert sent_bytes(server) == 0
    assert os.listdir(disk) == ["others"]


@pytest.mark.process
def test_a_file_that_is_too_large_for_the_disk_leaves_nothing(server: HttpServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stagepack", "pull", f"{server.url}/v0.stagepack", "-o", str(tmp_path / "out")]
    limited = ["sh", "-c", 'ulimit -f 20000; exec "$@"', "sh", *command]
    finished = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    assert f"{tmp_path}/out: could not be written: File too large: the bundle needs" in finished.stderr
    assert os.listdir(tmp_path) == []
