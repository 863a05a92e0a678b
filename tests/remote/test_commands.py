"""The commands take the URL of a bundle."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import stagepack
from stagepack.cli import main
from stagepack.errors import NotABundleError, OptionError
from stagepack.remote.pull import _write_signature
from tests.remote.http_server import HttpServer, Reply


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def url(server: HttpServer) -> str:
    return f"{server.url}/tiny.stagepack"


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "--stage", "1"],
        ["plan"],
        ["verify", "--json"],
        ["load"],
        ["load", "--stage", "2"],
    ],
)
def test_commands_that_print(url: str, arguments: list[str]) -> None:
    result = run(arguments[0], url, *arguments[1:])
    assert result.exit_code == 0, result.output


def test_commands_that_write(url: str, tmp_path: Path, served: Path) -> None:
    digest = stagepack.open(served / "tiny.stagepack").digest
    result = run("recut", url, "--stages", 2, "-o", tmp_path / "two.stagepack", "--digest", digest)
    assert result.exit_code == 0, result.output
    assert run("report", url, "-o", tmp_path / "page.html").exit_code == 0
    assert "<h1>tiny.stagepack</h1>" in (tmp_path / "page.html").read_text()
    result = run("triton", url, "-o", tmp_path / "models", "--json")
    assert json.loads(result.output)["models"][-1] == "tiny"


def test_another_digest(url: str, served: Path) -> None:
    for location in (url, served / "tiny.stagepack"):
        result = run("inspect", location, "--digest", "0" * 64)
        assert result.exit_code == 1
        assert "expected the bundle of the digest 000000" in result.output
    assert "64 characters" in run("inspect", url, "--digest", "0").output


def test_commands_that_cannot_write_to_a_url(url: str, served: Path) -> None:
    assert "stagepack pull" in run("onnx", url).output
    for arguments in (["recut", served / "tiny.stagepack", "--stages", 2], ["report", url], ["pull", url]):
        result = run(*arguments, "-o", "s3://models/m.stagepack")
        assert result.exit_code == 2
        assert "expected a path on this machine" in result.output
    assert "expected hf://ORGANIZATION/NAME" in run("push", served / "tiny.stagepack", url).output
    with pytest.raises(OptionError, match=r"stagepack pull"):
        stagepack.add_onnx(stagepack.open(url))
    with pytest.raises(NotABundleError, match=r"stagepack.open and stagepack.load take a URL"):
        stagepack.Bundle(url)


def test_pull(server: HttpServer, served: Path, tmp_path: Path) -> None:
    out = tmp_path / "pulled.stagepack"

    def fail(name: str, _index: int, reply: Reply) -> None:
        if name == "stage-1.safetensors":
            reply.body, reply.status, reply.headers = b"", 403, {"Content-Length": "0"}

    server.misbehave = fail
    result = run("pull", f"{server.url}/large.stagepack", "-o", out)
    assert result.exit_code == 1
    assert "credentials" in result.output
    assert not out.exists()
    server.misbehave = lambda _name, _index, _reply: None
    first_requests = server.requests["stage-0.safetensors"]
    result = run("pull", f"{server.url}/large.stagepack", "-o", out, "--json")
    assert json.loads(result.output)["digest"] == stagepack.open(served / "large.stagepack").digest
    assert server.requests["stage-0.safetensors"] <= first_requests + 2
    assert run("verify", out).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["pulled.stagepack"]


def test_pull_onto_the_same_bundle_downloads_nothing(server: HttpServer, served: Path, tmp_path: Path) -> None:
    out = tmp_path / "pulled.stagepack"
    url = f"{server.url}/tiny.stagepack"
    digest = stagepack.open(served / "tiny.stagepack").digest
    assert json.loads(run("pull", url, "-o", out, "--json").output)["downloaded"]
    (tmp_path / ".pulled.stagepack.download").mkdir()  # left by a process that was killed at the end
    before = dict(server.requests)
    assert "is there already, undamaged" in run("pull", url, "-o", out).output
    asked = {name for name, count in server.requests.items() if count != before.get(name)}
    assert asked == {"manifest.json"}
    before = dict(server.requests)
    assert not json.loads(run("pull", url, "-o", out, "--digest", digest, "--json").output)["downloaded"]
    assert dict(server.requests) == before
    assert [path.name for path in tmp_path.iterdir()] == ["pulled.stagepack"]


def test_pull_replaces_a_damaged_or_other_bundle_only_when_told(
    server: HttpServer, served: Path, tmp_path: Path
) -> None:
    out = tmp_path / "pulled.stagepack"
    url = f"{server.url}/tiny.stagepack"
    for other in ("tiny.stagepack", "large.stagepack"):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(served / other, out)
        content = bytearray((out / "stage-1.safetensors").read_bytes())
        (out / "stage-1.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        refused = run("pull", url, "-o", out)
        assert refused.exit_code == 1
        assert "or replace it (--overwrite)" in refused.output
        assert run("pull", url, "-o", out, "--overwrite").exit_code == 0
        assert run("verify", out).exit_code == 0
        assert [path.name for path in tmp_path.iterdir()] == ["pulled.stagepack"]
    (out / "notes.txt").write_text("mine")
    (out / "stage-1.safetensors").unlink()
    assert "would be lost: notes.txt" in run("pull", url, "-o", out, "--overwrite").output
    shutil.rmtree(out)
    out.mkdir()
    assert "is not a bundle, so it is not replaced" in run("pull", url, "-o", out, "--overwrite").output


def test_pull_that_is_killed_and_started_again_ends_with_the_bundle(
    server: HttpServer, served: Path, tmp_path: Path
) -> None:
    """As an init container does, at any moment."""
    out = tmp_path / "pulled.stagepack"
    command = [sys.executable, "-m", "stagepack", "pull", f"{server.url}/large.stagepack", "-o", str(out)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
    for seconds in (0.3, 0.5, 0.7, 0.9, 1.2):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.kill()
        process.wait()
        if out.exists():
            assert run("verify", out).exit_code == 0
    both = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert run("verify", out).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["pulled.stagepack"]


def test_pull_that_another_one_overtakes_ends_with_its_bundle(
    url: str, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "pulled.stagepack"

    def overtaken_write(path: Path, signature: bytes | None) -> None:
        _write_signature(path, signature)
        shutil.copytree(served / "tiny.stagepack", out)

    monkeypatch.setattr("stagepack.remote.pull._write_signature", overtaken_write)
    assert run("pull", url, "-o", out).exit_code == 0
    assert run("verify", out).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["pulled.stagepack"]


def test_what_lies_in_the_folder_of_a_download_is_not_believed(
    server: HttpServer, served: Path, tmp_path: Path
) -> None:
    out, victim = tmp_path / "pulled.stagepack", tmp_path / "victim"
    victim.write_text("precious")
    (served / "tiny.stagepack" / "model.sig").write_text("a signature")
    digest = stagepack.open(served / "tiny.stagepack").digest
    folder = tmp_path / ".pulled.stagepack.download"
    bundle_folder = folder / "bundles" / digest
    bundle_folder.mkdir(parents=True)
    content = (served / "tiny.stagepack" / "stage-1.safetensors").read_bytes()
    (bundle_folder / "stage-1.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (bundle_folder / "model.sig").symlink_to(victim)
    assert run("pull", f"{server.url}/tiny.stagepack", "-o", out).exit_code == 0
    assert run("verify", out).exit_code == 0
    assert (out / "model.sig").read_text() == "a signature"
    assert victim.read_text() == "precious"
    (served / "tiny.stagepack" / "model.sig").unlink()
    shutil.rmtree(out)
    bundle_folder.mkdir(parents=True)
    (bundle_folder / "model.sig").write_text("an old one")
    assert run("pull", f"{server.url}/tiny.stagepack", "-o", out).exit_code == 0
    assert not (out / "model.sig").exists()


def test_the_folder_of_a_download_is_no_link(server: HttpServer, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".pulled.stagepack.download").symlink_to(tmp_path / "elsewhere")
    result = run("pull", f"{server.url}/tiny.stagepack", "-o", tmp_path / "pulled.stagepack")
    assert result.exit_code == 1
    assert "expected the folder of a download of this user" in result.output
    assert list((tmp_path / "elsewhere").iterdir()) == []


# The stagepack command, with a cache for each process, as on machines of their own.
OWN_CACHE = """
import os, sys
os.environ["STAGEPACK_CACHE"] += "/" + os.environ["RANK"]
from stagepack.cli import main
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_torchrun_each_process_downloads_its_own_stages(
    served: Path, cache: Path, tmp_path: Path, server: HttpServer
) -> None:
    script = tmp_path / "script.py"
    script.write_text(OWN_CACHE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finished = subprocess.run(
        [*torchrun, str(script), "load", f"{server.url}/large.stagepack"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "largest difference 0\n" in finished.stdout
    files_of_rank = [{path.name for path in (cache / str(rank)).glob("bundles/*/*.safetensors")} for rank in range(2)]
    stages = stagepack.open(served / "large.stagepack").stages
    assert files_of_rank[0] == {*stages[0].weights, "example.safetensors"}
    assert files_of_rank[1] == set(stages[1].weights)


@pytest.mark.slow
def test_processes_of_stages(url: str, served: Path) -> None:
    ids = torch.arange(6).reshape(2, 3)
    expected = stagepack.load(served / "tiny.stagepack")(ids)["logits"]
    with stagepack.load(url, processes=2) as pipeline:
        assert torch.equal(pipeline(ids)["logits"], expected)
