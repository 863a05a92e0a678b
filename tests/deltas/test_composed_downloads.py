"""A bundle at a URL is made of the version before on this machine and of deltas at the URL, where that takes fewer bytes."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace

import stagepack
from stagepack.cli import main
from stagepack.deltas.document import RESULT_NAME
from stagepack.format.chunks import chunk_digest, file_entry
from stagepack.format.manifest_codec import encode_manifest
from stagepack.remote import download
from stagepack.remote.cache import Cache
from stagepack.remote.cache_contents import cached_bundles
from tests.deltas.conftest import Versions
from tests.deltas.test_roads import assert_same_folder
from tests.remote.http_server import HttpServer, Reply

X = torch.linspace(-1, 1, 128).reshape(2, 64).bfloat16()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAGEPACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "FIRST_PAUSE_SECONDS", 0.001)
    return tmp_path / "cache"


@pytest.fixture
def server(versions: Versions, cache: Path, tmp_path: Path) -> Iterator[HttpServer]:
    """A server that has the first version, which is in the cache."""
    served = tmp_path / "served"
    shutil.copytree(versions.a, served / "net.stagepack")
    with HttpServer(served) as http_server:
        stagepack.load(f"{http_server.url}/net.stagepack")
        http_server.sent.clear()
        yield http_server


def publish(server: HttpServer, bundle: Path, *deltas: Path) -> Path:
    """Put a version in the place of the one at the server, with deltas, which are named by their bases; return their folder."""
    folder = server.folder / "net.stagepack"
    shutil.rmtree(folder)
    shutil.copytree(bundle, folder)
    for delta in deltas:
        shutil.copytree(delta, folder / "deltas" / stagepack.open_delta(delta).base)
    return folder / "deltas"


def size_of(*folders: Path) -> int:
    return sum(path.stat().st_size for folder in folders for path in folder.iterdir() if path.is_file())


def check_loaded(server: HttpServer, expected: Path) -> int:
    """Load the bundle from its URL, compare all of it, and return the bytes that were sent."""
    server.sent.clear()
    pipeline = stagepack.load(f"{server.url}/net.stagepack")
    assert torch.equal(pipeline(X), stagepack.load(expected)(X))
    sent = server.sent.total()
    pipeline.bundle.verify()
    for path in expected.iterdir():
        assert (pipeline.bundle.path / path.name).read_bytes() == path.read_bytes()
    return sent


@pytest.mark.process
def test_a_load_takes_the_delta_from_the_version_in_the_cache(
    server: HttpServer,
    versions: Versions,
    cache: Path,
) -> None:
    publish(server, versions.b, versions.a_to_b)
    graphs = sum(path.stat().st_size for path in versions.b.iterdir() if path.suffix != ".safetensors")
    assert check_loaded(server, versions.b) < size_of(versions.a_to_b) + graphs
    digests = {bundle.digest for bundle in cached_bundles(Cache(cache))}
    assert digests == {stagepack.open(folder).digest for folder in (versions.a, versions.b)}
    names = {entry.blake3 for folder in (versions.a, versions.b) for entry in stagepack.open(folder).listed}
    assert {path.name for path in (cache / "files").iterdir()} <= names


@pytest.mark.process
def test_deltas_are_followed_to_the_version_that_is_wanted(server: HttpServer, versions: Versions) -> None:
    publish(server, versions.c, versions.a_to_b, versions.b_to_c)
    assert check_loaded(server, versions.c) < size_of(versions.c) / 8


@pytest.mark.process
def test_a_pull_takes_the_delta_from_the_bundle_that_it_replaces(
    server: HttpServer,
    versions: Versions,
    cache: Path,
    tmp_path: Path,
) -> None:
    shutil.rmtree(cache)
    out = Path(shutil.copytree(versions.a, tmp_path / "out.stagepack"))
    publish(server, versions.b, versions.a_to_b)
    url = f"{server.url}/net.stagepack"
    result = CliRunner().invoke(main, ["pull", url, "-o", str(out), "--overwrite"])
    assert result.exit_code == 0, result.output
    assert_same_folder(out, versions.b)
    assert server.sent.total() < size_of(versions.b) / 8
    assert not list(tmp_path.glob(".out.stagepack*"))


@pytest.mark.process
def test_a_stream_takes_the_delta(server: HttpServer, versions: Versions) -> None:
    publish(server, versions.b, versions.a_to_b)
    pipeline = stagepack.load(f"{server.url}/net.stagepack", stream=True)
    assert torch.equal(pipeline(X), stagepack.load(versions.b)(X))
    assert server.sent.total() < size_of(versions.b) / 8


def none(_: Path) -> None:
    """There is no delta."""


def damaged_data(folder: Path) -> None:
    path = max(folder.rglob("*.changes"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")


def missing_data(folder: Path) -> None:
    max(folder.rglob("*.changes"), key=lambda path: path.stat().st_size).unlink()


def damaged_document(folder: Path) -> None:
    path = next(folder.rglob("manifest.json"))
    path.write_bytes(path.read_bytes().replace(b"sparse", b"dense"))


def huge_document(folder: Path) -> None:
    next(folder.rglob("manifest.json")).write_bytes(b" " * 2**26)


def no_json(folder: Path) -> None:
    next(folder.rglob("manifest.json")).write_bytes(b"<html>not here</html>")


def document_with(folder: Path, **fields: object) -> None:
    [path] = folder.iterdir()
    document_with_path(path, **fields)


def document_with_path(path: Path, **fields: object) -> None:
    document = stagepack.open_delta(path).document
    (path / "manifest.json").write_bytes(encode_manifest(replace(document, **fields)))


def other_result(folder: Path) -> None:
    document_with(folder, result="0" * 64)


def other_base(folder: Path) -> None:
    document_with(folder, base="0" * 64)


def huge_data(folder: Path) -> None:
    """A delta whose document states more bytes than the bundle has, in a file that nobody applies."""
    [path] = folder.iterdir()
    files = stagepack.open_delta(path).document.files
    sizes = {RESULT_NAME: 2**40}
    document_with_path(path, files=tuple(replace(file, size=sizes.get(file.name, file.size)) for file in files))


def cycle(folder: Path) -> None:
    [path] = [path for path in folder.iterdir() if path.is_dir()]
    delta = stagepack.open_delta(path)
    shutil.copytree(path, folder / delta.result)
    document_with_path(folder / delta.result, base=delta.result, result=delta.base)


def other_content(folder: Path) -> None:
    """A delta that states the bundle that is wanted, with the manifest of that, and makes another one."""
    [path] = folder.iterdir()
    wanted, manifest = stagepack.open(folder.parent), (folder.parent / "manifest.json").read_bytes()
    base = stagepack.open(next(base for base in _bases if stagepack.open(base).digest == path.name))
    changed = {name: tensor + 1 for name, tensor in stagepack.load(base).state_dict().items()}
    lie = stagepack.delta(base, changed, out=folder.parent.parent / "lie")
    shutil.rmtree(path)
    shutil.move(lie.path, path)
    (path / RESULT_NAME).write_bytes(manifest)
    entry = file_entry(RESULT_NAME, len(manifest), [chunk_digest(manifest)])
    files = tuple(entry if file.name == RESULT_NAME else file for file in lie.document.files)
    kept = tuple(changed for changed in lie.document.changed if changed.name in wanted.files)
    document_with_path(path, result=wanted.digest, files=files, changed=kept)


_bases: list[Path] = []
LIES = [
    none,
    damaged_data,
    missing_data,
    damaged_document,
    huge_document,
    no_json,
    other_result,
    other_base,
    huge_data,
    cycle,
    other_content,
]


@pytest.mark.process
@pytest.mark.parametrize("lie", LIES)
def test_what_does_not_lead_to_the_bundle_ends_in_the_whole(
    server: HttpServer,
    versions: Versions,
    lie: Callable[[Path], None],
) -> None:
    _bases[:] = [versions.a]
    wanted = versions.c if lie is cycle else versions.b
    deltas = publish(server, wanted, *([] if lie is none else [versions.a_to_b]))
    lie(deltas)
    sent = check_loaded(server, wanted)
    # At most the whole, and once more what the delta states, which is less. The kernel takes of a server what nobody reads.
    sent -= server.sent["manifest.json"] if lie is huge_document else 0
    most = 2 if lie in (damaged_data, missing_data, other_content) else 1.1
    assert size_of(wanted) / 2 < sent < most * size_of(wanted)


@pytest.mark.process
@pytest.mark.parametrize("status", [403, 500, 503])
def test_a_server_that_refuses_the_deltas_sends_the_whole(
    server: HttpServer,
    versions: Versions,
    status: int,
) -> None:
    publish(server, versions.b, versions.a_to_b)
    digest = stagepack.open(versions.a).digest

    def refuse(name: str, _: int, reply: Reply) -> None:
        if digest in name:
            reply.status, reply.body = status, b""
            reply.headers["Content-Length"] = "0"

    server.misbehave = refuse
    check_loaded(server, versions.b)


@pytest.mark.process
def test_a_chain_that_takes_more_than_the_whole_is_not_taken(
    server: HttpServer, versions: Versions, tmp_path: Path
) -> None:
    model = versions.model("b")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight))
    large = stagepack.delta(versions.a, model.state_dict(), out=tmp_path / "large")
    new = stagepack.apply_deltas(versions.a, [large], out=tmp_path / "new")
    deltas = publish(server, new.path, large.path)
    for name in ("manifest.json", RESULT_NAME):
        assert (next(deltas.iterdir()) / name).is_file()
    sent = check_loaded(server, new.path)
    assert sent < 1.1 * size_of(new.path)
