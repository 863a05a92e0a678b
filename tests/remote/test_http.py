"""Bundles on an HTTP server: what is downloaded, and what a server that fails or lies gets."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import (
    DigestError,
    FormatError,
    NotABundleError,
    OptionError,
    RemoteError,
    StagepackError,
    WriteError,
)
from stagepack.format.chunks import CHUNK_BYTES
from tests.remote.http_server import HttpServer, Misbehavior, Reply

FILE = "stage-0.safetensors"


def assert_right(bundle: stagepack.Bundle, original: Path) -> None:
    bundle.verify()
    for file_name in bundle.files:
        assert (bundle.path / file_name).read_bytes() == (original / file_name).read_bytes()


def part_files(cache: Path) -> list[Path]:
    return list((cache / "files").glob("*.part"))


def test_opening_reads_the_manifest_alone(server: HttpServer, served: Path) -> None:
    bundle = stagepack.open(f"{server.url}/large.stagepack/")
    assert server.requests == {"manifest.json": 1}
    assert bundle.location == f"{server.url}/large.stagepack"
    assert bundle.digest == stagepack.open(served / "large.stagepack").digest


def test_a_stage_downloads_its_files_by_ranges(server: HttpServer, served: Path) -> None:
    stage = stagepack.load_stage(f"{server.url}/large.stagepack", 1)
    assert set(server.requests) == {"manifest.json", "stage-1.msgpack", "stage-1.safetensors"}
    size = (served / "large.stagepack/stage-1.safetensors").stat().st_size
    assert sorted(range_ for name, range_ in server.ranges if name == "stage-1.safetensors") == [
        f"bytes=0-{CHUNK_BYTES - 1}",
        f"bytes={CHUNK_BYTES}-{size - 1}",
    ]
    local = stagepack.load_stage(served / "large.stagepack", 1)
    x = torch.rand(1, 2100)
    assert torch.equal(stage(x)[0], local(x)[0])


def test_stages_that_are_streamed(server: HttpServer, served: Path) -> None:
    ids = torch.arange(6).reshape(2, 3)
    expected = stagepack.load(served / "tiny.stagepack")(ids)["logits"]
    assert torch.equal(stagepack.load(f"{server.url}/tiny.stagepack", stream=True)(ids)["logits"], expected)


def test_a_second_time_nothing_is_downloaded(server: HttpServer, served: Path) -> None:
    url = f"{server.url}/tiny.stagepack"
    assert_right(stagepack.open(url), served / "tiny.stagepack")
    first = server.requests.copy()
    bundle = stagepack.open(url)
    assert_right(bundle, served / "tiny.stagepack")
    assert server.requests - first == {"manifest.json": 1}
    stagepack.open(url, digest=bundle.digest).verify()
    assert server.requests["manifest.json"] == 2


def test_bundles_share_equal_files(server: HttpServer, served: Path, tmp_path: Path) -> None:
    stagepack.open(f"{server.url}/tiny.stagepack").verify()
    recut = served / "recut.stagepack"
    stagepack.recut(served / "tiny.stagepack", out=recut, split_at=["first", "second"], shared="transmit")
    requests = server.requests.copy()
    bundle = stagepack.open(f"{server.url}/recut.stagepack")
    assert_right(bundle, recut)
    equal = [file.name for file in bundle.manifest.files if server.requests[file.name] == requests[file.name]]
    assert "example.safetensors" in equal


def test_another_digest_is_refused(server: HttpServer) -> None:
    with pytest.raises(
        DigestError, match=r"expected the bundle of the digest 0{64}, found .*manifest.json|manifest.json"
    ):
        stagepack.open(f"{server.url}/tiny.stagepack", digest="0" * 64)
    with pytest.raises(OptionError, match=r"64 characters"):
        stagepack.open(f"{server.url}/tiny.stagepack", digest="abc")


def test_credentials_are_not_in_messages(server: HttpServer) -> None:
    url = server.url.replace("://", "://user:secret@") + "/absent.stagepack?token=secret"
    with pytest.raises(NotABundleError, match=r"absent.stagepack: not a stagepack bundle") as caught:
        stagepack.open(url)
    assert "secret" not in str(caught.value)

    def malformed(_name: str, _index: int, reply: Reply) -> None:
        reply.status, reply.headers = 200, {"Transfer-Encoding": "chunked"}

    def endless(_name: str, _index: int, reply: Reply) -> None:
        reply.body, reply.status, reply.headers = b"", 302, {"Content-Length": "0", "Location": url}

    for misbehave in (malformed, endless):  # the HTTP client has the URL in these messages
        server.misbehave = misbehave
        with pytest.raises(RemoteError) as failed:
            stagepack.open(url)
        assert "secret" not in str(failed.value)


def test_a_query_is_sent_for_each_file(server: HttpServer, served: Path) -> None:
    assert_right(stagepack.open(f"{server.url}/tiny.stagepack?token=1"), served / "tiny.stagepack")


def test_a_page_is_not_a_manifest(server: HttpServer) -> None:
    def page(_name: str, _index: int, reply: Reply) -> None:
        reply.body, reply.headers = b"<html>log in</html>", {}

    server.misbehave = page
    with pytest.raises(StagepackError, match=r"manifest.json"):
        stagepack.open(f"{server.url}/tiny.stagepack")


def test_a_manifest_without_end_is_not_read(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagepack.format.limits.MANIFEST_BYTES", 2**20)

    def endless(_name: str, _index: int, reply: Reply) -> None:
        reply.body, reply.headers = b"{" * 2**24, {}

    server.misbehave = endless
    with pytest.raises(FormatError, match=r"L1"):
        stagepack.open(f"{server.url}/tiny.stagepack")
    assert server.sent["manifest.json"] < 2**24


def truncate(_name: str, index: int, reply: Reply) -> None:
    if index % 3:
        reply.sent_bytes = len(reply.body) // 2


def fail_twice(_name: str, index: int, reply: Reply) -> None:
    if index < 2:
        reply.body, reply.status, reply.headers = b"", (503, 429)[index], {"Content-Length": "0", "Retry-After": "0"}


def no_length(_name: str, _index: int, reply: Reply) -> None:
    reply.headers.pop("Content-Length")


def of_file(*, once: bool = False, headers: Mapping[str, str] | None = None, **fields: Any) -> Misbehavior:
    """Change fields and headers of the answers for FILE, or of the first one alone."""

    def misbehave(name: str, index: int, reply: Reply) -> None:
        if name == FILE and not (once and index):
            vars(reply).update(fields)
            reply.headers |= headers or {}

    return misbehave


def lie(name: str, _index: int, reply: Reply) -> None:
    if name == FILE:
        reply.body = bytes(len(reply.body))


def lie_once(name: str, index: int, reply: Reply) -> None:
    if index == 0:
        lie(name, index, reply)


def send_more(name: str, _index: int, reply: Reply) -> None:
    if name == FILE:
        reply.body += b"more"
        reply.headers.pop("Content-Length")


def other_size(name: str, _index: int, reply: Reply) -> None:
    if name == FILE:
        reply.headers["Content-Range"] = reply.headers["Content-Range"].rpartition("/")[0] + "/17"


def status(number: int) -> Misbehavior:
    return of_file(body=b"", status=number, headers={"Content-Length": "0"})


@pytest.mark.parametrize(
    "misbehave",
    [
        truncate,
        fail_twice,
        lie_once,
        of_file(once=True, piece_bytes=2**22, pause_seconds=0.8),
        no_length,
        of_file(once=True, headers={"Content-Range": "bytes 1-2/3"}),
    ],
    ids=["truncate", "fail", "lie", "stall", "no length", "other range"],
)
def test_passing_failures_are_survived(server: HttpServer, served: Path, misbehave: Misbehavior) -> None:
    server.misbehave = misbehave
    assert_right(stagepack.open(f"{server.url}/large.stagepack"), served / "large.stagepack")


@pytest.mark.parametrize(
    ("misbehave", "error", "says"),
    [
        (lie, DigestError, "D2"),
        (of_file(sent_bytes=1000), RemoteError, "tried 5 times"),
        (send_more, DigestError, "D1"),
        (other_size, DigestError, "a file of 17 bytes"),
        (of_file(headers={"Content-Encoding": "gzip"}), RemoteError, "gzip"),
        (status(404), RemoteError, "missing"),
        (status(403), RemoteError, "credentials"),
        (status(500), RemoteError, "tried 5 times"),
        (status(416), DigestError, "D1"),
        # Each pause is shorter than the longest wait.
        pytest.param(of_file(piece_bytes=1, pause_seconds=0.2), RemoteError, "too slowly", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_keeps_failing_is_refused(
    server: HttpServer, cache: Path, misbehave: Misbehavior, error: type[StagepackError], says: str
) -> None:
    server.misbehave = misbehave
    bundle = stagepack.open(f"{server.url}/large.stagepack")
    with pytest.raises(error, match=says) as caught:
        stagepack.load_stage(bundle, 0)
    assert f"{server.url}/large.stagepack/{FILE}" in str(caught.value)
    assert not (bundle.path / FILE).exists()
    assert not (cache / "files" / bundle.files[FILE].blake3).exists()


def test_a_server_without_ranges_sends_whole_files(server: HttpServer, served: Path) -> None:
    server.has_ranges = False
    bundle = stagepack.open(f"{server.url}/large.stagepack")
    assert_right(bundle, served / "large.stagepack")
    size = bundle.files[FILE].size
    assert server.sent[FILE] <= 2 * size  # a request for a range may have begun to send


def test_a_lie_of_a_server_without_ranges_is_refused(server: HttpServer, cache: Path) -> None:
    server.has_ranges, server.misbehave = False, lie
    bundle = stagepack.open(f"{server.url}/large.stagepack")
    with pytest.raises(DigestError, match=r"D2"):
        bundle.fetch([FILE])
    assert not (bundle.path / FILE).exists()


def test_a_download_goes_on_where_it_stopped(server: HttpServer, served: Path, cache: Path) -> None:
    def fail_second_chunk(name: str, _index: int, reply: Reply) -> None:
        if name == FILE and reply.headers["Content-Range"].startswith(f"bytes {CHUNK_BYTES}-"):
            deadline = time.monotonic() + 0.3
            while server.sent[FILE] < CHUNK_BYTES and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.1)  # until the first chunk is written
            reply.body, reply.status, reply.headers = b"", 403, {"Content-Length": "0"}
        elif name == FILE:
            reply.piece_bytes = 2**24

    server.misbehave = fail_second_chunk
    bundle = stagepack.open(f"{server.url}/large.stagepack")
    for _ in range(50):  # until the first chunk has come before the second one failed
        server.sent.clear()
        with pytest.raises(RemoteError, match=r"403"):
            bundle.fetch([FILE])
        if part_files(cache)[0].stat().st_blocks * 512 >= CHUNK_BYTES:
            break
    server.misbehave = lambda _name, _index, _reply: None
    server.ranges.clear()
    bundle.fetch([FILE])
    assert [range_ for _, range_ in server.ranges] == [f"bytes={CHUNK_BYTES}-{bundle.files[FILE].size - 1}"]
    assert_right(bundle, served / "large.stagepack")
    assert not part_files(cache)


def test_what_lies_in_a_part_file_is_not_believed(server: HttpServer, served: Path, cache: Path) -> None:
    bundle = stagepack.open(f"{server.url}/large.stagepack")
    (cache / "files" / f"{bundle.files[FILE].blake3}.part").write_bytes(b"\1" * (2 * CHUNK_BYTES + 5))
    assert_right(bundle, served / "large.stagepack")


def test_a_damaged_file_in_the_cache_is_downloaded_again(server: HttpServer, served: Path) -> None:
    bundle = stagepack.open(f"{server.url}/large.stagepack")
    bundle.fetch([FILE])
    with (bundle.path / FILE).open("r+b") as file:
        file.write(b"damaged")
    assert_right(bundle, served / "large.stagepack")


def test_a_damaged_graph_in_the_cache_is_downloaded_again(server: HttpServer) -> None:
    bundle = stagepack.open(f"{server.url}/tiny.stagepack")
    graph = bundle.graph(0)
    path = bundle.path / "stage-0.msgpack"
    path.write_bytes(bytes(path.stat().st_size))
    assert bundle.graph(0) == graph


def test_a_bundle_that_changes_on_the_server_is_refused(server: HttpServer, served: Path, tmp_path: Path) -> None:
    shutil.copytree(served / "tiny.stagepack", tmp_path / "tiny.stagepack")
    server.folder = tmp_path
    bundle = stagepack.open(f"{server.url}/tiny.stagepack")
    (tmp_path / "tiny.stagepack/stage-0.msgpack").write_bytes(bytes(bundle.files["stage-0.msgpack"].size))
    with pytest.raises(DigestError, match=r"D2"):
        bundle.graph(0)


def test_redirects_are_followed(server: HttpServer, served: Path) -> None:
    with HttpServer(served) as other:

        def redirect(name: str, _index: int, reply: Reply) -> None:
            reply.body, reply.status = b"", 302
            reply.headers = {"Content-Length": "0", "Location": f"{other.url}/tiny.stagepack/{name}"}

        server.misbehave = redirect
        assert_right(stagepack.open(f"{server.url}/tiny.stagepack"), served / "tiny.stagepack")
        other.misbehave = redirect
        with pytest.raises(RemoteError, match=r"manifest.json.*the server redirects in a circle"):
            stagepack.open(f"{server.url}/tiny.stagepack")


def test_a_full_disk_is_an_error_before_the_download(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = stagepack.open(f"{server.url}/large.stagepack")
    monkeypatch.setattr("stagepack.remote.cache.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(WriteError, match=r"the download needs 17.6 MB, and 5 B are free"):
        bundle.fetch([FILE])
    assert not server.requests[FILE]


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_disk_that_becomes_full_is_an_error(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, has_ranges: bool
) -> None:
    def fill(*_: object) -> None:
        raise OSError(28, "No space left on device")

    server.has_ranges = has_ranges
    bundle = stagepack.open(f"{server.url}/large.stagepack")
    monkeypatch.setattr("os.pwrite", fill)
    with pytest.raises(WriteError, match=r"No space left on device.*STAGEPACK_CACHE"):
        bundle.fetch([FILE])


def test_no_server(cache: Path) -> None:
    with pytest.raises(RemoteError, match=r"tried 5 times"):
        stagepack.open("http://127.0.0.1:9/m.stagepack")
    with pytest.raises(OptionError, match=r"HOST"):
        stagepack.open("https:///m.stagepack")
    with pytest.raises(OptionError, match=r"nosuch://: Protocol not known"):
        stagepack.open("nosuch://bucket/m.stagepack")
