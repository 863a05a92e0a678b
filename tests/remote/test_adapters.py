"""Adapters at a URL are loaded, shown and downloaded as bundles are."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from click.testing import CliRunner, Result

import stagepack
from stagepack.adapter.adapted_bundle import AdaptedBundle
from stagepack.cli import main
from stagepack.documents import open_listed
from stagepack.errors import AdapterError, DigestError, OptionError
from stagepack.named_adapters import adapter_texts
from stagepack.remote.cache import Cache
from stagepack.remote.cache_contents import keep_newest_bundles
from tests.adapters.lora import write_tiny_adapter
from tests.conformance.vectors import TINY, TINY_DELTA
from tests.remote.http_server import HttpServer
from tests.remote.hub_server import REPOSITORY, HubServer

# The library of the hub uses its HTTP client in an old way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

ROWS = numpy.array([[1, -1], [2, 2]], "float32")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_tiny_adapter(folder / "pirate")
    shutil.copytree(TINY, folder / "tiny.stagepack")
    return folder


@pytest.fixture
def adapter_server(adapters: Path, cache: Path) -> Iterator[HttpServer]:
    with HttpServer(adapters) as server:
        yield server


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_an_adapter_is_loaded_from_a_url(adapter_server: HttpServer, adapters: Path) -> None:
    url = f"{adapter_server.url}/pirate"
    (expected,) = stagepack.load(TINY, adapters=[adapters / "pirate"])(ROWS, adapter="pirate")
    digest = stagepack.open_adapter(adapters / "pirate").digest
    for given in ([url], {"pirate": url}, [f"pirate={url}?token=secret"], [stagepack.open_adapter(url)]):
        pipeline = stagepack.load(TINY, adapters=given)
        assert pipeline.adapters == ("pirate",)
        assert pipeline(ROWS, adapter="pirate")[0].tolist() == expected.tolist()
    # Other processes open it by its URL with the secrets, which no message shows.
    secret = stagepack.open_adapter(f"{url}?token=secret")
    assert adapter_texts(AdaptedBundle(stagepack.open(TINY), {"pirate": secret})) == (
        f"pirate={url}?token=secret@sha256:{digest}",
    )
    assert secret.location == url
    adapter_server.requests.clear()
    stagepack.load(TINY, adapters=[f"{url}@sha256:{digest}"])
    assert not adapter_server.requests  # the cache has it
    with pytest.raises(DigestError, match=r"expected the .* of the digest"):
        stagepack.load(TINY, adapters=[f"{url}@sha256:{'0' * 64}"])
    with pytest.raises(OptionError, match="expected a name"):
        stagepack.load(TINY, adapters=[adapter_server.url + "/a%20b"])


def test_a_damaged_adapter_in_the_cache_is_downloaded_again(adapter_server: HttpServer, cache: Path) -> None:
    url = f"{adapter_server.url}/pirate"
    stagepack.load(TINY, adapters=[url])
    [tensors] = cache.glob("bundles/*/adapter.safetensors")
    content = tensors.read_bytes()
    tensors.chmod(0o644)
    tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert stagepack.load(TINY, adapters=[url]).adapters == ("pirate",)
    [tensors] = cache.glob("bundles/*/adapter.safetensors")
    assert tensors.read_bytes() == content


def test_commands_take_the_url(adapter_server: HttpServer, adapters: Path, tmp_path: Path) -> None:
    url, out = f"{adapter_server.url}/pirate", tmp_path / "pulled"
    for arguments, says in (
        (("inspect", url), "an adapter: "),
        (("verify", url), "verified 2 files"),
        (("diff", url, adapters / "pirate"), "equal"),
        (("load", TINY, "--adapter", f"x={url}"), "loaded after"),
        (("pull", url, "-o", out), "an adapter: "),
        (("pull", url, "-o", out), "is there already, undamaged"),
        (("adapter", url, "--base", TINY, "--merge", "-o", tmp_path / "merged"), "wrote"),
    ):
        done = run(*arguments)
        assert (done.exit_code, says in done.output) == (0, True), done.output
    assert sorted(path.name for path in out.iterdir()) == ["adapter.safetensors", "manifest.json"]
    assert stagepack.open_adapter(out).digest == stagepack.open_adapter(adapters / "pirate").digest


def test_what_is_at_the_place_of_a_download_is_replaced_by_its_kind_alone(
    adapter_server: HttpServer, tmp_path: Path
) -> None:
    bundle = shutil.copytree(TINY, tmp_path / "taken")
    for overwrite in ([], ["--overwrite"]):
        done = run("pull", f"{adapter_server.url}/pirate", "-o", bundle, *overwrite)
        assert done.exit_code == 1, done.output
    assert stagepack.open(bundle).digest == stagepack.open(TINY).digest
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["taken"]


def test_an_adapter_at_a_url_belongs_to_its_base(adapter_server: HttpServer, served: Path) -> None:
    with pytest.raises(AdapterError, match=rf"{adapter_server.url}/pirate: is an adapter of the bundle"):
        stagepack.load(served / "tiny.stagepack", adapters=[f"{adapter_server.url}/pirate"])


@pytest.mark.parametrize("kind", ["bundle", "delta", "adapter"])
def test_interrupted_downloads_of_each_kind_are_kept(kind: str, adapters: Path, tmp_path: Path) -> None:
    """The downloads that were used last stay, with the parts of their files."""
    folder = {"bundle": TINY, "delta": TINY_DELTA, "adapter": adapters / "pirate"}[kind]
    listed = open_listed(folder)
    cache = Cache(tmp_path / "cache")
    cache.add_manifest(listed.digest, (folder / "manifest.json").read_bytes())
    parts = {cache.folder / "files" / f"{entry.blake3}.part" for entry in listed.listed}
    foreign = cache.folder / "files" / f"{'0' * 64}.part"
    for part in (*parts, foreign):
        part.touch()
    keep_newest_bundles(cache, 1)
    assert set((cache.folder / "files").glob("*.part")) == parts


def test_an_adapter_is_pushed_and_loaded(hub: HubServer, adapters: Path) -> None:
    result = run("push", adapters / "pirate", f"hf://{REPOSITORY}")
    assert result.exit_code == 0, result.output
    assert f'adapters={{"name": "hf://{REPOSITORY}"}}' in hub.files[hub.head]["README.md"].decode()
    assert stagepack.load(TINY, adapters={"pirate": f"hf://{REPOSITORY}"}).adapters == ("pirate",)
    result = run("push", TINY, f"hf://{REPOSITORY}")  # the files of the adapter are removed
    assert result.exit_code == 0, result.output
    assert "adapter.safetensors" not in hub.files[hub.head]
