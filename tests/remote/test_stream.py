"""Remote bundles that compute while they are downloaded."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import DigestError, RemoteError, StagepackError
from stagepack.format.chunks import CHUNK_BYTES
from tests.remote.http_server import HttpServer, Reply
from tests.remote.test_http import FILE, lie, part_files, status
from tests.unit.test_streaming import LinearsSeen
from tests.waiting import wait_until

LAST_FILE = "stage-1.safetensors"
X = torch.rand(1, 2100)


class HeldServer:
    """Holds back what a server sends of the last file after its first chunk, until `rest` is set."""

    def __init__(self, server: HttpServer) -> None:
        self.rest = threading.Event()
        server.misbehave = self._hold

    def _hold(self, name: str, _index: int, reply: Reply) -> None:
        if name == LAST_FILE and not reply.headers.get("Content-Range", "").startswith("bytes 0-"):
            self.rest.wait(60)


@pytest.fixture(autouse=True)
def _patience(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers here are slow, and do not fail."""
    monkeypatch.setattr("stagepack.remote.http_store.STALL_SECONDS", 30.0)


def test_it_computes_before_the_last_byte_is_there(server: HttpServer, served: Path) -> None:
    held = HeldServer(server)
    pipeline = stagepack.load(f"{server.url}/large.stagepack", stream=True)
    total_bytes = sum(file.size for file in stagepack.open(served / "large.stagepack").manifest.files)
    with torch.no_grad(), LinearsSeen(held.rest.set) as seen:
        assert not held.rest.is_set()
        answer = pipeline(X)
    assert seen.count == 2
    assert torch.equal(answer, stagepack.load(served / "large.stagepack")(X))
    assert sum(server.sent.values()) <= total_bytes, "nothing is downloaded twice"


def test_a_slow_server(server: HttpServer, served: Path) -> None:
    ready = threading.Event()

    def slow(name: str, _index: int, reply: Reply) -> None:
        if name.endswith(".safetensors"):
            reply.piece_bytes, reply.pause_seconds = 2**21, 0.05
            if not reply.headers.get("Content-Range", "").startswith("bytes 0-"):
                ready.wait(60)

    server.misbehave = slow
    stage: Any = stagepack.load_stage(f"{server.url}/large.stagepack", 0, stream=True)
    size = (served / "large.stagepack" / FILE).stat().st_size
    assert server.sent[FILE] < size, "the stage is ready before its weights are there"
    ready.set()
    assert torch.equal(stage(X)[0], stagepack.load_stage(served / "large.stagepack", 0)(X)[0])
    assert server.sent[FILE] == size
    stage.wait_for_weights()
    requests = server.requests.copy()
    again = stagepack.load_stage(f"{server.url}/large.stagepack", 0, stream=True)
    assert torch.equal(stage(X)[0], again(X)[0])
    assert server.requests - requests == {"manifest.json": 1}


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize(
    ("misbehave", "error", "says"),
    [(lie, DigestError, "D2"), (status(404), RemoteError, "missing"), (status(403), RemoteError, "credentials")],
    ids=["lie", "404", "403"],
)
def test_a_mirror_that_lies_or_fails_is_refused(
    server: HttpServer,
    cache: Path,
    has_ranges: bool,
    misbehave: Callable[[str, int, Reply], None],
    error: type[StagepackError],
    says: str,
) -> None:
    server.misbehave, server.has_ranges = misbehave, has_ranges
    with pytest.raises(error, match=says) as caught:
        stagepack.load_stage(f"{server.url}/large.stagepack", 0, stream=True)(X)
    assert f"large.stagepack/{FILE}" in str(caught.value)
    assert not list(cache.glob(f"bundles/*/{FILE}"))


def test_a_lie_in_a_later_chunk_fails_each_call(server: HttpServer, served: Path, cache: Path) -> None:
    is_loaded = threading.Event()

    def lie_later(name: str, _index: int, reply: Reply) -> None:
        if name == FILE and not reply.headers["Content-Range"].startswith("bytes 0-"):
            is_loaded.wait(60)
            reply.body = bytes(len(reply.body))

    server.misbehave = lie_later
    stage: Any = stagepack.load_stage(f"{server.url}/large.stagepack", 0, stream=True)
    is_loaded.set()
    for _ in range(2):
        with pytest.raises(DigestError, match=r"D2"):
            stage(X)
    with pytest.raises(DigestError, match=r"D2"):
        stage.state_dict()
    # The first chunk is kept.
    del stage
    server.misbehave = lambda _name, _index, _reply: None
    server.ranges.clear()
    stage = stagepack.load_stage(f"{server.url}/large.stagepack", 0, stream=True)
    assert torch.equal(stage(X)[0], stagepack.load_stage(served / "large.stagepack", 0)(X)[0])
    assert [first for name, first in server.ranges if name == FILE and first.startswith("bytes=0-")] == []
    wait_until(lambda: not part_files(cache))


def test_a_server_without_ranges(server: HttpServer, served: Path) -> None:
    server.has_ranges = False
    pipeline = stagepack.load(f"{server.url}/large.stagepack", stream=True)
    assert torch.equal(pipeline(X), stagepack.load(served / "large.stagepack")(X))


def test_a_damaged_file_of_the_cache_is_downloaded_at_the_next_load(server: HttpServer, served: Path) -> None:
    bundle = stagepack.open(f"{server.url}/large.stagepack")
    bundle.fetch([FILE])
    with (bundle.path / FILE).open("r+b") as file:
        file.seek(CHUNK_BYTES + 5)
        file.write(b"damaged")
    with pytest.raises(DigestError, match=r"D2"):
        stagepack.load_stage(bundle, 0, stream=True)(X)
    stage = stagepack.load_stage(bundle, 0, stream=True)
    assert torch.equal(stage(X)[0], stagepack.load_stage(served / "large.stagepack", 0)(X)[0])


def test_a_stage_that_is_dropped_ends_its_download(server: HttpServer) -> None:
    held = HeldServer(server)
    stage: Any = stagepack.load_stage(f"{server.url}/large.stagepack", 1, stream=True)
    assert _download_threads()
    del stage
    gc.collect()
    held.rest.set()
    wait_until(lambda: not _download_threads())


def _download_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name in ("stagepack-stream", "stagepack-download")]


ENDS_EARLY = """
import sys, stagepack
stage = stagepack.load_stage(sys.argv[1], 0, stream=True)
print("loaded", flush=True)
"""


def test_a_process_that_ends_early_does_not_wait_and_the_next_one_goes_on(
    server: HttpServer, served: Path, cache: Path
) -> None:
    held = threading.Event()

    def hold(name: str, _index: int, reply: Reply) -> None:
        if name == FILE and not reply.headers["Content-Range"].startswith("bytes 0-"):
            held.wait(60)

    server.misbehave = hold
    url = f"{server.url}/large.stagepack"
    finished = subprocess.run(
        [sys.executable, "-c", ENDS_EARLY, url], capture_output=True, text=True, check=False, timeout=50
    )
    held.set()
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "loaded\n", "")
    assert len(part_files(cache)) == 1
    server.ranges.clear()
    stage = stagepack.load_stage(url, 0, stream=True)
    assert torch.equal(stage(X)[0], stagepack.load_stage(served / "large.stagepack", 0)(X)[0])
    size = (served / "large.stagepack" / FILE).stat().st_size
    assert [range_ for name, range_ in server.ranges if name == FILE] == [f"bytes={CHUNK_BYTES}-{size - 1}"]
    wait_until(lambda: not part_files(cache))  # its name is changed after its last chunk was used
