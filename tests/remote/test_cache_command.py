"""`stagepack cache`: what it lists and removes, and what happens to those who use it."""

import fcntl
import gc
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import stagepack
from stagepack.cli import main
from stagepack.errors import WriteError
from stagepack.remote.cache import Cache, PartFile
from stagepack.remote.cache_contents import cached_bundles, remove_bundles
from tests.remote.http_server import HttpServer

X = torch.rand(1, 2100)
IDS = torch.arange(6).reshape(2, 3)


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["cache", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def names(bundles: list[dict[str, Any]]) -> list[str]:
    return [bundle["location"].rpartition("/")[2] for bundle in bundles]


def age(cache: Path, days: float) -> None:
    for path in (cache / "locations").iterdir():
        os.utime(path, (time.time() - days * 86_400,) * 2)


def test_an_empty_cache(cache: Path) -> None:
    assert run() == {"folder": str(cache), "bytes": 0, "bundles": []}
    assert "0 bundles" in CliRunner().invoke(main, ["cache"]).output


def test_bundles_are_listed_and_old_ones_removed(server: HttpServer, cache: Path) -> None:
    stagepack.open(f"{server.url}/tiny.stagepack").verify()
    stagepack.open(f"{server.url}/large.stagepack?token=secret").fetch(["stage-0.safetensors"])
    gc.collect()
    facts = run("--older-than", "1")
    assert names(facts["bundles"]) == ["large.stagepack", "tiny.stagepack"]
    assert facts["removed"] == []
    assert facts["bytes"] >= facts["bundles"][0]["bytes"] > 17_000_000
    assert "secret" not in CliRunner().invoke(main, ["cache"]).output
    age(cache, 2)
    stagepack.open(f"{server.url}/tiny.stagepack")
    gc.collect()
    facts = run("--older-than", "1")
    assert names(facts["removed"]) == ["large.stagepack"]
    assert names(facts["bundles"]) == ["tiny.stagepack"]
    assert facts["bytes"] < 1_000_000


def test_a_cache_is_trimmed_to_a_size(server: HttpServer, cache: Path, served: Path) -> None:
    stagepack.open(f"{server.url}/large.stagepack").verify()
    time.sleep(0.02)
    stagepack.open(f"{server.url}/tiny.stagepack").verify()
    gc.collect()
    (cache / "files" / f"{0:064}.part").write_bytes(bytes(10_000))  # of a download that was interrupted
    facts = run("--trim-to", "20MB")
    assert names(facts["removed"]) == ["large.stagepack"]
    assert facts["bytes"] < 1_000_000
    assert not list((cache / "files").glob("*.part"))
    assert names(run("--trim-to", "0")["removed"]) == ["tiny.stagepack"]
    assert not list((cache / "files").iterdir())
    assert torch.equal(
        stagepack.load(f"{server.url}/large.stagepack")(X), stagepack.load(served / "large.stagepack")(X)
    )


def test_what_is_used_is_kept(server: HttpServer, cache: Path) -> None:
    bundle = stagepack.open(f"{server.url}/tiny.stagepack")
    pipeline = stagepack.load(bundle)
    answer = pipeline(IDS)["logits"]
    assert run("--trim-to", "0")["removed"] == []
    assert names(run("--older-than", "0")["bundles"]) == ["tiny.stagepack"]
    with Cache(cache).lock(bundle.files["stage-1.msgpack"]) as part:  # a download
        run("--trim-to", "0")
        assert part.path.exists()
    # Without its bundle, a pipeline has mapped what it needs.
    shutil.rmtree(cache)
    assert torch.equal(pipeline(IDS)["logits"], answer)


def test_a_bundle_that_was_removed_is_downloaded_again(server: HttpServer, cache: Path) -> None:
    digest = stagepack.open(f"{server.url}/tiny.stagepack").digest
    gc.collect()
    run("--trim-to", "0")
    stagepack.open(f"{server.url}/tiny.stagepack", digest=digest).verify()


def test_bundles_are_opened_while_others_remove_them(server: HttpServer, cache: Path) -> None:
    """Each step of one process comes between any two of the other."""
    is_done = threading.Event()
    failures: list[BaseException] = []

    def remove() -> None:
        try:
            while not is_done.is_set():
                remove_bundles(Cache(cache), most_bytes=0)
                cached_bundles(Cache(cache))
        except BaseException as error:  # noqa: BLE001 - the test shows it
            failures.append(error)

    removers = [threading.Thread(target=remove) for _ in range(2)]
    for remover in removers:
        remover.start()
    try:
        for _ in range(8):
            stagepack.open(f"{server.url}/tiny.stagepack").verify()
    finally:
        is_done.set()
        for remover in removers:
            remover.join()
    assert not failures


def test_part_that_another_download_begins_anew_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, parts, lock_file = cache / "files" / f"{0:064}.part", list[PartFile](), fcntl.flock
    Cache(cache)
    path.write_bytes(bytes(8192))

    def flock(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_NB and not parts:
            path.unlink()
            parts.append(PartFile(path))
        lock_file(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    remove_bundles(Cache(cache), most_bytes=0)
    with parts[0] as part:
        part.complete(0, cache / "manifest")
    assert (cache / "manifest").is_file()


def test_a_folder_that_is_removed_while_it_is_made_again(
    server: HttpServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = stagepack.open(f"{server.url}/tiny.stagepack").digest
    make_folder, removals = os.mkdir, []

    def mkdir(path: Path, *mode: int) -> None:
        try:
            make_folder(path, *mode)
        except FileExistsError:
            if Path(path).name == digest:
                shutil.rmtree(path)
                removals.append(path)
            raise

    monkeypatch.setattr(os, "mkdir", mkdir)
    assert stagepack.open(f"{server.url}/tiny.stagepack").digest == digest
    assert removals == [cache / "bundles" / digest]


def test_a_bundle_that_is_removed_while_it_is_open_is_an_error(server: HttpServer) -> None:
    bundle = stagepack.open(f"{server.url}/tiny.stagepack")
    shutil.rmtree(bundle.path)
    with pytest.raises(WriteError, match="was removed from the cache while it was in use: open the bundle again"):
        bundle.verify()


def test_a_cache_that_cannot_be_written_is_used(server: HttpServer, cache: Path) -> None:
    digest = stagepack.open(f"{server.url}/tiny.stagepack").digest
    stagepack.open(f"{server.url}/tiny.stagepack").verify()
    shutil.rmtree(cache / "locations")
    (cache / "locations").touch()  # in the place of a folder, since root may write into any
    for given_digest in (None, digest):
        stagepack.open(f"{server.url}/tiny.stagepack", digest=given_digest).verify()


@pytest.mark.parametrize("arguments", [["--trim-to", "much"], ["--older-than", "-1"]])
def test_wrong_usage(cache: Path, arguments: list[str]) -> None:
    assert CliRunner().invoke(main, ["cache", *arguments]).exit_code == 2
