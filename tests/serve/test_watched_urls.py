"""A server follows the deltas at a URL, each under the digest of its base, in bounded disk; and the bundle at a URL that it polls."""

import json
import logging
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.errors import WriteError
from stagepack.format.chunks import File
from stagepack.remote import stored_composed
from stagepack.remote.cache import Cache, PartFile
from stagepack.remote.cache_contents import cached_bundles, disk_bytes
from stagepack_serving.server import delta_chains, watched_deltas
from tests.remote.http_server import HttpServer, Reply
from tests.serve.local_server import LocalServer, local_server, serving
from tests.serve.servers import AnyServer, post
from tests.serve.version_models import export_scale
from tests.waiting import wait_until

LAST = 7
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions of a model whose answers say which one it is, and the deltas between them."""
    folder = tmp_path_factory.mktemp("made")
    for number in range(1, LAST + 1):
        export_scale(folder / f"{number}.stagepack", float(number))
        if number > 1:
            stagepack.delta(
                folder / f"{number - 1}.stagepack",
                folder / f"{number}.stagepack",
                out=folder / f"{number}.delta",
                version=f"step {number}",
            )
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAGEPACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(watched_deltas, "URL_SECONDS", 0.05)
    return tmp_path / "cache"


@pytest.fixture
def store(tmp_path: Path, cache: Path) -> Iterator[HttpServer]:
    (tmp_path / "store" / "deltas").mkdir(parents=True)
    with HttpServer(tmp_path / "store") as http_server:
        yield http_server


def publish(store: HttpServer, delta: Path) -> Path:
    """Put a delta where a reader finds it by its base; the manifest comes last."""
    target = store.folder / "deltas" / stagepack.open_delta(delta).base
    shutil.copytree(delta, target, ignore=shutil.ignore_patterns("manifest.json"))
    shutil.copy(delta / "manifest.json", target)
    return target


def ask(server: AnyServer) -> tuple[float, str]:
    body = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1.0] * 3}]}
    status, answer, _ = post(server.http, "/v2/models/scale/infer", json.dumps(body))
    assert status == 200, answer
    return answer["outputs"][0]["data"][0], answer["parameters"]["weight_version"]


def answers(server: AnyServer, number: int) -> bool:
    return ask(server) == (float(number), f"step {number}")


def has_more_requests(store: HttpServer, count: int) -> bool:
    return store.requests["manifest.json"] > count


def watching(store: HttpServer, made: Path, *options: str) -> tuple[list[str], tuple[str, ...]]:
    return [f"scale={made / '1.stagepack'}"], ("--watch-deltas", f"{store.url}/deltas", *options)


@pytest.mark.parametrize("options", [(), pytest.param(("--processes", "1"), marks=pytest.mark.slow)])
def test_deltas_are_taken_as_they_appear(store: HttpServer, made: Path, options: tuple[str, ...]) -> None:
    bundles, options = watching(store, made, *options)
    publish(store, made / "2.delta")
    publish(store, made / "3.delta")
    with serving(bundles, *options) as server:
        wait_until(lambda: ask(server) == (3.0, "step 3"))
        publish(store, made / "4.delta")
        wait_until(lambda: ask(server) == (4.0, "step 4"))


def test_a_folder_is_followed_by_its_url(store: HttpServer, made: Path) -> None:
    with local_server([f"scale={made / '1.stagepack'}"], "--watch-deltas", f"file://{store.folder}/deltas") as server:
        time.sleep(0.3)  # it looks for a delta that is not there yet
        publish(store, made / "2.delta")
        wait_until(lambda: ask(server) == (2.0, "step 2"))


def test_a_store_that_fails_is_asked_again_and_named(
    store: HttpServer, made: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagepack.remote.download.FIRST_PAUSE_SECONDS", 0.001)
    publish(store, made / "2.delta")

    def misbehave(name: str, index: int, reply: Reply) -> None:
        if index < 3 or (name.endswith(".changes") and index < 8):
            reply.status, reply.body = 500, b""
            reply.headers["Content-Length"] = "0"

    store.misbehave = misbehave
    bundles, options = watching(store, made)
    with local_server(bundles, *options) as server:
        wait_until(lambda: ask(server) == (2.0, "step 2"))
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors
    assert all(error.startswith(f"{store.url}/deltas: ") for error in errors)
    assert len(errors) <= 3


def test_a_delta_that_is_damaged_is_not_taken_until_it_is_mended(
    store: HttpServer, made: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagepack.remote.download.FIRST_PAUSE_SECONDS", 0.001)
    target = publish(store, made / "2.delta")
    data = next(target.glob("*.changes"))
    content = data.read_bytes()
    data.write_bytes(content[:-1] + b"\x55")
    bundles, options = watching(store, made)
    with local_server(bundles, *options) as server:
        wait_until(lambda: any(data.name in record.getMessage() for record in caplog.records))
        assert ask(server)[0] == 1.0
        data.write_bytes(content)
        wait_until(lambda: ask(server) == (2.0, "step 2"))


def test_a_delta_that_a_client_took_back_is_not_taken_again(store: HttpServer, made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "updates"
    shutil.copytree(made / "1.stagepack", folder / "first")
    publish(store, made / "2.delta")
    bundles, options = watching(store, made, "--model-control", "explicit", "--update-folder", str(folder))
    with local_server(bundles, *options) as server:
        wait_until(lambda: ask(server) == (2.0, "step 2"))
        body = json.dumps({"parameters": {"source": "first", "weight_version": "first"}})
        status, answer, _ = post(server.http, "/v2/repository/models/scale/update", body)
        assert status == 200, answer
        asked = store.requests["manifest.json"]
        wait_until(lambda: store.requests["manifest.json"] > asked + 2)
        assert ask(server) == (1.0, "first")


def test_chains_are_followed_for_ever_and_the_disk_is_freed(
    store: HttpServer, made: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_chains, "MOST_DELTAS", 2)
    monkeypatch.setattr(delta_chains, "_MOST_SHARE", 100)
    bundles, options = watching(store, made)
    used = []
    with local_server(bundles, *options) as server:
        for number in range(2, LAST + 1):
            publish(store, made / f"{number}.delta")
            wait_until(partial(answers, server, number))
            wait_until(partial(has_more_requests, store, store.requests["manifest.json"] + 1))
            used.append(disk_bytes(Cache(cache)))
            shutil.rmtree(next((store.folder / "deltas").iterdir()))
        model = server.control.models.find("scale", "")
        # Versions 4 and 7 are written as bundles; the one before is freed, and so are all deltas.
        assert model.bundle.digest == stagepack.open(made / "7.stagepack").digest
        wait_until(lambda: {bundle.digest for bundle in cached_bundles(Cache(cache))} == {model.bundle.digest})
        assert model.bundle.patches is None
    assert max(used) < 2 * sum(path.stat().st_blocks * 512 for path in (made / "7.stagepack").iterdir()) + 2**17
    stagepack.open(cache / "bundles" / model.bundle.digest).verify()


def test_what_is_not_signed_is_not_taken(
    store: HttpServer, made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("model_signing", reason="signatures are not tested: pip install '.[sign]' installs it")
    from tests.signing.signers import make_signer

    monkeypatch.setattr(delta_chains, "MOST_DELTAS", 0)
    signer = make_signer(tmp_path, "release")
    base = shutil.copytree(made / "1.stagepack", tmp_path / "1.stagepack")
    stagepack.sign(base, key=signer.key)
    target = publish(store, made / "2.delta")
    options = ("--watch-deltas", f"{store.url}/deltas", "--require-signature", str(signer.public_key))
    with local_server([f"scale={base}"], *options) as server:
        wait_until(lambda: any("expected a signed delta" in record.getMessage() for record in caplog.records))
        assert ask(server)[0] == 1.0
    stagepack.sign(target, key=signer.key)
    with local_server([f"scale={base}"], *options) as server:
        wait_until(lambda: ask(server) == (2.0, "step 2"))
        # The server runs the bundle that the delta made, under the signature of the delta.
        wait_until(lambda: server.control.models.find("scale", "").bundle.patches is None)


def test_a_delta_that_is_larger_than_its_bundle_is_not_fetched(
    store: HttpServer, made: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_deltas, "_MORE_BYTES", -(10**6))
    publish(store, made / "2.delta")
    bundles, options = watching(store, made)
    with local_server(bundles, *options) as server:
        wait_until(lambda: any("expected a delta of at most" in record.getMessage() for record in caplog.records))
        assert ask(server)[0] == 1.0
    assert not any(name.endswith(".changes") for name in store.requests)


def export_wide(folder: Path, value: float) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Linear(600, 1000)
    with torch.no_grad():
        model.weight[::100, 0] = value
    stagepack.export(model, (torch.ones(1, 600),), out=folder, overwrite=True)
    return folder


@pytest.fixture
def polled(store: HttpServer, tmp_path: Path) -> Iterator[LocalServer]:
    export_wide(store.folder / "wide.stagepack", 1.0)
    options = ("--model-control", "poll", "--poll-s", "0.1")
    with local_server([f"wide={store.url}/wide.stagepack"], *options) as server:
        yield server


def test_a_bundle_at_a_url_is_polled_and_made_of_a_delta(
    polled: LocalServer, store: HttpServer, tmp_path: Path
) -> None:
    old = stagepack.open(shutil.copytree(store.folder / "wide.stagepack", tmp_path / "old"))
    new = stagepack.open(export_wide(tmp_path / "new", 2.0))
    delta = stagepack.delta(old, new, out=tmp_path / "delta")
    served = store.folder / "wide.stagepack"
    shutil.copytree(delta.path, served / "deltas" / old.digest)
    store.sent.clear()
    for path in sorted(new.path.iterdir(), key=lambda path: path.name == "manifest.json"):
        shutil.copy(path, served)
    wait_until(lambda: polled.control.models.find("wide", "").bundle.digest == new.digest)
    assert not store.sent["stage-0.safetensors"]


def test_a_url_that_cannot_be_polled_leaves_the_model(
    polled: LocalServer, store: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    digest = polled.control.models.find("wide", "").bundle.digest
    shutil.rmtree(store.folder / "wide.stagepack")
    wait_until(lambda: any("wide: cannot be polled" in record.getMessage() for record in caplog.records))
    assert polled.control.models.find("wide", "").bundle.digest == digest


def test_a_chain_that_cannot_be_written_is_followed_nevertheless(
    store: HttpServer, made: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delta_chains, "MOST_DELTAS", 1)
    attempts = []

    def full(bundle: stagepack.Bundle, entry: File, part: PartFile) -> None:
        attempts.append(bundle.digest)
        raise WriteError("no space is left")

    monkeypatch.setattr(stored_composed, "_write", full)
    bundles, options = watching(store, made)
    with local_server(bundles, *options) as server:
        for number in range(2, LAST + 1):
            publish(store, made / f"{number}.delta")
            wait_until(partial(answers, server, number))
        wait_until(lambda: len(cached_bundles(Cache(cache))) == LAST - 1)
    assert 0 < len(set(attempts)) < LAST - 2
    assert any("no space is left" in record.getMessage() for record in caplog.records)
