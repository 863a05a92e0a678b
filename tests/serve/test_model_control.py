"""Versions of a model are loaded, replaced and unloaded while a server runs."""

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from tritonclient.utils import InferenceServerException

from tests.bundle_editor import BundleEditor
from tests.serve.local_server import LocalServer, local_server, refusal
from tests.serve.servers import Client, ask_slow, grpc_channel, post, refused, stagepack_server, wait_for_requests
from tests.serve.version_models import Repository, count, export_counter, export_scale, factor_of
from tests.waiting import wait_until


@pytest.fixture(params=["http", "grpc"])
def client(repository: Repository, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(request.param, repository.server) as client:
        yield client


def test_load_and_unload(repository: Repository, client: Client) -> None:
    name = f"load_{client.protocol}"
    export_scale(repository.folder / name / "1", 1.0)
    (repository.folder / name / "latest").mkdir()
    assert repository.index(name)[""]["reason"] == "not loaded"
    assert not client.raw.is_model_ready(name) if client.protocol == "http" else True
    client.raw.load_model(name)
    assert client.raw.is_model_ready(name, "1")
    assert repository.index(name) == {"1": {"name": name, "version": "1", "state": "READY"}}

    export_scale(repository.folder / name / "2", 2.0)
    assert factor_of(client, name) == 1
    client.raw.load_model(name)
    assert factor_of(client, name) == factor_of(client, name, model_version="2") == 2
    wait_until(lambda: repository.states(name) == {"2": "READY"})
    with pytest.raises(InferenceServerException, match="version '1' is not loaded: there is 2"):
        factor_of(client, name, model_version="1")
    assert client.metadata(name)["versions"] == ["2"]

    client.raw.unload_model(name)
    with pytest.raises(InferenceServerException, match="the model is not loaded"):
        factor_of(client, name)
    assert repository.index(name)["2"]["reason"] == "unloaded"
    client.raw.load_model(name)
    assert factor_of(client, name) == 2


def test_clients_choose_names_and_nothing_else(repository: Repository, client: Client) -> None:
    name = f"chosen_{client.protocol}"
    export_scale(repository.folder / name / "1", 1.0)
    folder = repository.folder
    for other_name in ("other", "..", f"{name}/1", f"../{folder.name}/{name}", str(folder / name)):
        with refused("404", "NOT_FOUND"):
            client.raw.load_model(other_name)
    with pytest.raises(InferenceServerException, match="no model 'other' is loaded"):
        client.raw.unload_model("other")
    with pytest.raises(InferenceServerException, match="expected no parameters, found config"):
        client.raw.load_model(name, config=json.dumps({"version_policy": {"all": {}}}))
    for body in (b"[]", b"{", b'{"parameters": 1}'):
        assert post(repository.server.http, f"/v2/repository/models/{name}/load", body)[0] == 400


WEIGHTS = "stage-0.safetensors"


def change_weight(editor: BundleEditor) -> None:
    editor.flip_bit(WEIGHTS, -4)


def change_example(editor: BundleEditor) -> None:
    """Another weight than that of the recorded example, with digests that fit."""
    content = (editor / WEIGHTS).read_bytes()
    editor.write_file(WEIGHTS, content.replace(struct.pack("<f", 2.0), struct.pack("<f", 7.0)))


DAMAGES: list[tuple[Callable[[BundleEditor], object], str]] = [
    (change_weight, "the content was changed"),
    (lambda editor: editor.truncate(WEIGHTS, (editor / WEIGHTS).stat().st_size - 4), "bytes"),
    (change_example, "example"),
    (lambda editor: (editor / "manifest.json").unlink(), "manifest"),
]


def test_a_broken_version_is_refused_and_the_old_one_goes_on(repository: Repository, tmp_path: Path) -> None:
    folder = export_scale(repository.folder / "broken" / "1", 1.0).parent
    good = export_scale(tmp_path / "good", 2.0)
    with Client("http", repository.server) as client:
        client.raw.load_model("broken")
        for damage, reason in DAMAGES:
            damage(BundleEditor(shutil.copytree(good, folder / "2")))
            with pytest.raises(InferenceServerException, match=reason):
                client.raw.load_model("broken")
            assert repository.states("broken") == {"1": "READY", "2": "UNAVAILABLE"}
            assert reason in repository.index("broken")["2"]["reason"]
            assert factor_of(client, "broken") == 1
            shutil.rmtree(folder / "2")


def test_a_bundle_that_is_overwritten_is_read_when_it_is_loaded_again(repository: Repository) -> None:
    path = repository.folder / "overwritten" / "1"
    with Client("grpc", repository.server) as client:
        for factor in (1.0, 2.0, 3.0):
            export_scale(path, factor)
            assert factor == 1 or factor_of(client, "overwritten") == factor - 1
            client.raw.load_model("overwritten")
            assert factor_of(client, "overwritten") == factor
        change_weight(BundleEditor(export_scale(path, 4.0)))
        with pytest.raises(InferenceServerException, match="the content was changed"):
            client.raw.load_model("overwritten")
        assert factor_of(client, "overwritten") == 3
        entry = repository.index("overwritten")["1"]
        assert (entry["state"], entry["reason"].split(":")[0]) == ("READY", "refused")
        assert client.raw.is_server_ready()


def test_sequences_stay_with_their_version(repository: Repository) -> None:
    name = "sums"
    with Client("grpc", repository.server) as client:
        export_counter(repository.folder / name / "1", 1.0)
        client.raw.load_model(name)
        for sequence_id in (1, 2, 3):
            assert count(client, name, sequence_id, sequence_start=True) == 1
        export_counter(repository.folder / name / "2", 10.0)
        client.raw.load_model(name)
        assert count(client, name, 1) == 2
        assert count(client, name, 4, sequence_start=True) == 10
        assert count(client, name, 1, model_version="1") == 3
        with pytest.raises(InferenceServerException, match="unknown sequence 1"):
            count(client, name, 1, model_version="2")
        assert count(client, name, 2, sequence_start=True) == 10  # the older one of that id is over
        assert count(client, name, 3) == 2
        assert repository.index(name)["1"]["state"] == "UNLOADING"
        assert repository.index(name)["1"]["reason"] == "0 requests and 2 sequences are left"
        assert count(client, name, 1, sequence_end=True) == 4
        wait_until(lambda: "1" not in repository.states(name))  # sequence 3 is idle
        assert count(client, name, 4) == 20


def test_a_start_on_another_version_ends_the_sequence_and_a_refused_one_does_not(
    repository: Repository, client: Client
) -> None:
    name = f"restarted_{client.protocol}"
    export_counter(repository.folder / name / "1", 1.0)
    client.raw.load_model(name)
    assert count(client, name, 5, sequence_start=True) == 1
    wrong = {"x": numpy.ones(4, "float32")}  # of another shape
    with pytest.raises(InferenceServerException, match="x"):
        client.ask(name, wrong, outputs=["sum"], sequence_id=5, sequence_start=True)
    assert count(client, name, 5) == 2
    export_counter(repository.folder / name / "2", 10.0)
    client.raw.load_model(name)
    assert count(client, name, 5) == 3
    assert count(client, name, 5, sequence_start=True, model_version="2") == 10
    assert count(client, name, 5) == 20
    wait_until(lambda: repository.states(name) == {"2": "READY"})


def test_health_follows_the_models(repository: Repository) -> None:
    export_scale(repository.folder / "health" / "1", 1.0)
    with Client("grpc", repository.server) as client, grpc_channel(repository.server) as channel:
        health = HealthStub(channel)
        assert health.Check(HealthCheckRequest()).status == HealthCheckResponse.SERVING
        watch = health.Watch(HealthCheckRequest(service="health"))
        statuses = [next(watch).status]
        client.raw.load_model("health")
        statuses.append(next(watch).status)
        client.raw.unload_model("health")
        statuses.append(next(watch).status)
        watch.cancel()
    unknown, serving = HealthCheckResponse.SERVICE_UNKNOWN, HealthCheckResponse.SERVING
    assert statuses == [unknown, serving, unknown]


def test_the_log_of_a_refused_version_is_one_printable_line(tmp_path: Path) -> None:
    (log := tmp_path / "log").touch()
    folder = export_scale(tmp_path / "models" / "scale" / "1", 1.0).parent
    options = ("--model-repository", str(folder.parent), "--model-control", "poll", "--poll-s", "0.2")
    with stagepack_server([], *options, errors=log) as server:
        repository = Repository(server, folder.parent)
        refused = BundleEditor.copy(folder / "1", tmp_path / "refused")
        evil_name = "\x1b[2J\x1b]0;owned\x07\n2026-01-01 00:00:00,000 INFO scale: version 2 was loaded\r"
        refused.edit_weight_header("stage-0.safetensors", lambda fields: fields.update({evil_name: {"dtype": "U8"}}))
        refused.path.rename(folder / "2")
        wait_until(lambda: "UNAVAILABLE" in repository.states("scale").values())
    lines = log.read_text().splitlines()
    [line] = [line for line in lines if "refused" in line]
    assert r"\x1b[2J" in line
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("2026-01-01") for line in lines)


def test_specific_versions_roll_back_a_model(tmp_path: Path) -> None:
    folder = export_scale(tmp_path / "models" / "scale" / "1", 1.0).parent
    export_scale(folder / "2", 2.0)
    options = ("--model-repository", str(folder.parent))
    with local_server([], *options, "--version-policy", "specific:1") as server, Client("http", server) as client:
        assert factor_of(client, "scale") == 1
        assert client.metadata("scale")["versions"] == ["1"]
    says = "'scale': has the versions 1, 2, none of which is served: --version-policy specific:3"
    assert says in refusal(*options, "--version-policy", "specific:3")


def test_repository_without_what_is_served_is_no_silent_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (models := tmp_path / "models").mkdir()
    option = ("--model-repository", models)
    assert "the model repository is empty: expected bundles at NAME/VERSION" in refusal(*option)
    export_scale(models / "my model" / "1", 1.0)
    assert refusal(*option)
    assert f"{models}/my model: not served: a name has letters" in caplog.text
    export_scale(models / "scale", 1.0)  # without a version
    expected = "'scale': no bundle of this model was found: expected a folder for each version, named by a number"
    assert expected in refusal(*option)
    assert expected in refusal(*option, "--model-control", "poll")


def test_poll(tmp_path: Path) -> None:
    folder = export_scale(tmp_path / "models" / "scale" / "1", 1.0).parent
    options = ("--model-repository", str(folder.parent), "--model-control", "poll", "--poll-s", "0.2")
    with local_server([], *options, "--version-policy", "latest:2") as server, Client("http", server) as client:
        repository = Repository(server, folder.parent)
        export_scale(folder / "2", 2.0)
        wait_until(lambda: factor_of(client, "scale") == 2)
        assert factor_of(client, "scale", model_version="1") == 1
        export_scale(folder / "3", 3.0)
        wait_until(lambda: factor_of(client, "scale") == 3)
        wait_until(lambda: repository.states("scale") == {"2": "READY", "3": "READY"})
        assert client.metadata("scale")["versions"] == ["2", "3"]
        with pytest.raises(InferenceServerException, match="--model-control explicit"):
            client.raw.load_model("scale")
        shutil.rmtree(folder)
        wait_until(lambda: "READY" not in repository.states("scale").values())
        assert client.raw.is_server_ready()


def test_version_that_is_being_unloaded_is_in_the_index_once(slow: Path) -> None:
    with local_server([slow], "--model-control", "explicit") as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask_slow, server, 400)
        wait_for_requests(server, "slow")
        assert post(server.http, "/v2/repository/models/slow/unload", b"")[0] == 200
        index = post(server.http, "/v2/repository/index", b"")[1]
        assert [(entry["version"], entry["state"]) for entry in index] == [("1", "UNLOADING")]
        assert answer.result().shape == (256, 512)
        unloaded = [{"name": "slow", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}]
        wait_until(lambda: post(server.http, "/v2/repository/index", b"")[1] == unloaded)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_clients_change_nothing_unless_the_operator_allows_it(small: LocalServer, protocol: str) -> None:
    with Client(protocol, small) as client:
        changes = [
            lambda: client.raw.load_model("skips"),
            lambda: client.raw.unload_model("skips"),
            lambda: client.raw.update_log_settings({"log_info": False}),
        ]
        for change in changes:
            with refused("403", "PERMISSION_DENIED", says="--model-control explicit"):
                change()
        settings = client.raw.get_log_settings() if protocol == "http" else client.raw.get_log_settings(as_json=True)
        assert "log_info" in str(settings)
