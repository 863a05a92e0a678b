"""Several processes, and processes that are killed, share one cache."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stagepack
from stagepack.format.chunks import check_content
from tests.remote.http_server import HttpServer, Reply

# Downloads all files of the bundle at a URL.
PROGRAM = """
import sys, stagepack
bundle = stagepack.open(sys.argv[1])
bundle.fetch(bundle.files)
print(bundle.digest)
"""


def start(url: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", PROGRAM, url], stdout=subprocess.PIPE, text=True)


def limit_rate(_name: str, _index: int, reply: Reply) -> None:
    reply.piece_bytes, reply.pause_seconds = 2**20, 0.01


def test_two_processes_download_once(server: HttpServer, served: Path) -> None:
    server.misbehave = limit_rate
    url = f"{server.url}/large.stagepack"
    processes = [start(url) for _ in range(2)]
    digest = stagepack.open(served / "large.stagepack").digest
    for process in processes:
        assert process.communicate(timeout=60)[0].strip() == digest
    manifest_requests = server.requests.pop("manifest.json")
    assert manifest_requests == 2
    sent_bytes = sum(count for name, count in server.sent.items() if name != "manifest.json")
    assert sent_bytes == sum(file.size for file in stagepack.open(url).manifest.files)


def kill_at_random_moments(server: HttpServer, served: Path, cache: Path, kill_count: int) -> int:
    """Kill downloads, and remove what is complete when all is, so that there is always something to download.

    Returns how many were killed in the middle of a file.
    """
    moments = random.Random(0)  # noqa: S311 - no secret
    server.misbehave = limit_rate
    url = f"{server.url}/large.stagepack"
    entries = stagepack.open(served / "large.stagepack").files
    part_count = 0
    for _ in range(kill_count):
        requests_before = server.requests["manifest.json"]
        process = start(url)
        while server.requests["manifest.json"] == requests_before:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.6))
        process.send_signal(signal.SIGKILL)
        process.wait()
        part_count += any(path.stat().st_size for path in cache.glob("files/*.part"))
        process.stdout.close()  # type: ignore[union-attr]
        # Whatever has its final name is right.
        complete = list(cache.glob("bundles/*/*.*"))
        for path in complete:
            if path.name in entries:
                assert not check_content(entries[path.name], path.read_bytes()), path
        if len(complete) == len(entries) + 1:
            for path in (*complete, *cache.glob("files/*")):
                path.unlink()
    server.misbehave = lambda _name, _index, _reply: None
    stagepack.open(url).verify()
    assert not list(cache.glob("files/*.part"))
    return part_count


def test_downloads_that_are_killed(server: HttpServer, served: Path, cache: Path) -> None:
    kill_at_random_moments(server, served, cache, 4)


@pytest.mark.slow
def test_200_downloads_that_are_killed(server: HttpServer, served: Path, cache: Path) -> None:
    assert kill_at_random_moments(server, served, cache, 200) > 50
