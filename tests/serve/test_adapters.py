"""Adapters are loaded and unloaded while a server answers: by the repository API, by vLLM's, and from a folder."""

import functools
import json
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy
import pytest
import torch
from tritonclient.utils import InferenceServerException

import stagepack
from tests.adapters.lora import adapted, write_lora
from tests.adapters.models import make_model
from tests.hostile.attack import run
from tests.serve.local_server import LocalServer, local_server, serving
from tests.serve.servers import AnyServer, Client, get, post, post_json, refused
from tests.serve.version_models import export_scale
from tests.unit.test_entry_points import Autoencoder
from tests.unit.test_joint_update import export
from tests.waiting import wait_until

IDS = torch.tensor([[5, 9, 31, 7], [7, 8, 9, 3], [3, 3, 4, 1]])
RANKS = {"bert.encoder.layer.0.attention.self.query": 4, "bert.encoder.layer.1.output.dense": 2, "classifier": 2}
NAMES = ("formal", "casual", "third")
EXPLICIT, POLL = ("--model-control", "explicit"), ("--model-control", "poll")


class Made(NamedTuple):
    """A bundle, the folder of its adapters, and the answers by adapter."""

    bundle: Path
    adapters: Path
    answers: dict[str | None, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("served")
    model = make_model("bert")
    model.save_pretrained(folder / "model")
    bundle = stagepack.export(folder / "model", out=folder / "bert.stagepack", stages=2)
    (folder / "adapters").mkdir()
    answers: dict[str | None, Any] = {None: answer(model)}
    for seed, name in enumerate(NAMES):
        lora = write_lora(model, folder / f"lora-{name}", RANKS, seed, lora_alpha=64)
        stagepack.write_adapter(bundle, lora, out=folder / "adapters" / name)
        with adapted(model, lora):
            answers[name] = answer(model)
    return Made(bundle.path, folder / "adapters", answers)


def answer(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits.numpy()


@pytest.fixture
def folder(made: Made, tmp_path: Path) -> Path:
    """A folder of adapters that a test may change."""
    return shutil.copytree(made.adapters, tmp_path / "adapters")


@pytest.fixture
def server(made: Made, folder: Path) -> Iterator[LocalServer]:
    with local_server([made.bundle], "--adapter-folder", str(folder), *EXPLICIT) as server:
        yield server


def repository(server: AnyServer, name: str, action: str) -> tuple[int, Any]:
    return post(server.http, f"/v2/repository/models/{name}/{action}", b"")[:2]


def lora(server: AnyServer, action: str, **fields: Any) -> tuple[int, str]:
    """The status and the text of an answer of vLLM's API."""
    status, content = _post_text(server, f"/v1/{action}_lora_adapter", fields)
    return status, content


def _post_text(server: AnyServer, path: str, fields: Any) -> tuple[int, str]:
    assert isinstance(server, LocalServer)
    answer = server.http.post(path, content=json.dumps(fields))
    return answer.status_code, answer.text


def ask(server: AnyServer, name: Any, model: str = "bert") -> Any:
    """The logits of a request that names an adapter, or why it is refused."""
    inputs = [
        {"name": input_name, "shape": list(IDS.shape), "datatype": "INT64", "data": array.tolist()}
        for input_name, array in (("input_ids", IDS), ("attention_mask", torch.ones_like(IDS)))
    ]
    fields = {} if name is None else {"parameters": {"adapter": name}}
    status, answer = post_json(server, f"/v2/models/{model}/infer", inputs=inputs, **fields)
    if status != 200:
        return status, answer["error"]
    return numpy.array(answer["outputs"][0]["data"], numpy.float32).reshape(len(IDS), -1)


def check(server: AnyServer, made: Made, *names: str) -> None:
    """Compare the answers of a server that has some adapters, and what it says of them."""
    for name in (None, *names):
        numpy.testing.assert_allclose(ask(server, name), made.answers[name], rtol=1e-6, atol=1e-6)
    for name in names:
        numpy.testing.assert_allclose(ask(server, None, name), made.answers[name], rtol=1e-6, atol=1e-6)
        assert get(server.http, f"/v2/models/{name}")[1] == get(server.http, "/v2/models/bert")[1]
    for name in {*NAMES} - {*names}:
        assert ask(server, None, name)[0] == get(server.http, f"/v2/models/{name}/ready")[0] == 404
        status, error = ask(server, name)
        assert (status, f"found {name!r}" in error) == (400, True), error
    entries = post(server.http, "/v2/repository/index", b"")[1]
    ready = [(entry["name"], entry["reason"]) for entry in entries if entry["state"] == "READY" and "reason" in entry]
    assert ready == [(name, "adapter of bert") for name in names]
    metadata = json.loads(get(server.http, "/v2/models/bert")[1])
    assert metadata.get("parameters", {}) == ({"adapters": [*names]} if names else {})
    config = json.loads(get(server.http, "/v2/models/bert/config")[1])
    assert config.get("parameters", {}) == ({"adapters": {"string_value": ", ".join(names)}} if names else {})


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_repository_api_loads_adapters_by_their_names(server: LocalServer, made: Made, protocol: str) -> None:
    check(server, made)
    with Client(protocol, server) as client:
        client.raw.load_model("formal")
        check(server, made, "formal")
        client.raw.load_model("formal")
        client.raw.load_model("casual")
        check(server, made, "formal", "casual")
        client.raw.unload_model("formal")
        check(server, made, "casual")
        with pytest.raises(InferenceServerException, match="no model 'formal' is loaded"):
            client.raw.unload_model("formal")
        with pytest.raises(InferenceServerException, match="expected no parameters, found config"):
            client.raw.load_model("formal", config="{}")
        client.raw.unload_model("bert")
        with refused("400", "INVALID_ARGUMENT", says="which is not loaded: load its model"):
            client.raw.load_model("formal")
        client.raw.load_model("bert")
        client.raw.load_model("formal")
        check(server, made, "formal")


def test_an_adapter_that_has_changed_is_loaded_again(server: LocalServer, made: Made, folder: Path) -> None:
    repository(server, "formal", "load")
    shutil.rmtree(folder / "formal")
    shutil.copytree(made.adapters / "casual", folder / "formal")
    assert repository(server, "formal", "load") == (200, {})
    numpy.testing.assert_allclose(ask(server, "formal"), made.answers["casual"], rtol=1e-6, atol=1e-6)


def test_clients_of_vllm_load_adapters(server: LocalServer, made: Made, folder: Path) -> None:
    status, text = lora(server, "load", lora_name="formal", lora_path="formal")
    assert (status, text) == (200, "Success: LoRA adapter 'formal' added successfully.")
    assert lora(server, "load", lora_name="mine", lora_path=str(folder / "casual"))[0] == 200
    check_names = {"formal": "formal", "mine": "casual"}
    for name, other in check_names.items():
        numpy.testing.assert_allclose(ask(server, name), made.answers[other], rtol=1e-6, atol=1e-6)
    status, text = lora(server, "load", lora_name="mine", lora_path="third")
    assert (status, "has an adapter of this name already" in text) == (400, True)
    assert lora(server, "load", lora_name="mine", lora_path="third", load_inplace=True)[0] == 200
    numpy.testing.assert_allclose(ask(server, "mine"), made.answers["third"], rtol=1e-6, atol=1e-6)
    assert lora(server, "unload", lora_name="mine", lora_int_id=None)[0] == 200
    status, text = lora(server, "unload", lora_name="mine")
    assert (status, json.loads(text)["error"]["code"]) == (404, "model_not_found")
    check(server, made, "formal")


def test_a_client_never_chooses_a_path(server: LocalServer, made: Made, folder: Path, tmp_path: Path) -> None:
    secret = shutil.copytree(made.adapters / "formal", tmp_path / "secret")
    (folder / "empty").mkdir()
    paths = (
        str(secret),
        "../secret",
        str(folder / ".." / "secret"),
        "..",
        ".",
        "",
        "/",
        "formal/..",
        "empty",
        "\0",
        "a" * 9999,
    )
    for path in paths:
        status, text = lora(server, "load", lora_name="x", lora_path=path)
        assert (status, "no adapter" in text) == (404, True), (path, text)
    for name in ("x=y", "", "../x", ".", "a/b", "\0", "a" * 9999, "bert"):
        status, text = lora(server, "load", lora_name=name, lora_path="formal")
        assert status == 400, (name, text)
    for name in ("..", "empty", "secret", "%2e%2e%2fsecret", "x=y"):
        assert repository(server, name, "load")[0] == 404
    bodies: list[Any] = [{}, {"lora_name": "x"}, {"lora_name": 1, "lora_path": "formal"}, []]
    for body in bodies:
        assert _post_text(server, "/v1/load_lora_adapter", body)[0] == 400
    check(server, made)


def test_only_the_operator_allows_loads(made: Made, folder: Path) -> None:
    with local_server([made.bundle], "--adapter", str(folder / "formal")) as server:
        for status, text in (
            lora(server, "load", lora_name="x", lora_path="formal"),
            lora(server, "unload", lora_name="formal"),
        ):
            assert (status, "--model-control explicit" in text) == (403, True)
        assert repository(server, "formal", "unload")[0] == 403
        check(server, made, "formal")
    with local_server([made.bundle], "--adapter", str(folder / "formal"), *EXPLICIT) as server:
        assert lora(server, "load", lora_name="x", lora_path="casual")[0] == 404
        assert repository(server, "formal", "unload")[0] == 200
        check(server, made)
        assert repository(server, "formal", "load")[0] == 200
        check(server, made, "formal")


def test_adapters_and_models_have_distinct_names(made: Made, folder: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name in ("bert", "later"):
        shutil.copytree(made.bundle, models / name / "1")
    (folder / "third").rename(folder / "later")
    options = ("--model-repository", str(models), "--load-model", "bert", "--adapter-folder", str(folder), *EXPLICIT)
    with local_server([], *options) as server:
        status, text = lora(server, "load", lora_name="later", lora_path="formal")
        assert (status, "a model has this name" in text) == (400, True)  # of the repository, which is not loaded
        assert lora(server, "load", lora_name="new", lora_path="formal")[0] == 200
        shutil.copytree(made.bundle, models / "new" / "1")
        status, answer = repository(server, "new", "load")
        assert status == 400
        assert (
            "expected distinct names of models and adapters, found 'new', which is an adapter of bert"
            in answer["error"]
        )
        assert repository(server, "new", "unload")[0] == 200
        assert repository(server, "new", "load")[0] == 200
        assert repository(server, "later", "load")[0] == 200  # the model
        status, text = lora(server, "load", lora_name="bert", lora_path="formal")
        assert (status, "a model has this name" in text) == (400, True)
        # All models of the bundle take it.
        assert repository(server, "formal", "load")[0] == 200
        assert all(model.adapters.names == ("formal",) for model in server.control.models.serving)


def test_a_model_that_brings_an_adapter_with_the_name_of_a_model_is_refused(
    made: Made, folder: Path, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    shutil.copytree(made.bundle, models / "bert" / "1")
    export_scale(models / "formal" / "1", 2.0)
    options = ("--model-repository", str(models), "--load-model", "formal", "--adapter", str(folder / "formal"))
    with local_server([], *options, *EXPLICIT) as server:
        status, answer = repository(server, "bert", "load")
        assert status == 400
        assert "found 'formal', which is a model and an adapter of bert: pass --adapter NAME=FOLDER" in answer["error"]
        assert repository(server, "formal", "unload")[0] == 200
        assert repository(server, "bert", "load")[0] == 200
        check(server, made, "formal")
        status, answer = repository(server, "formal", "load")
        assert (status, "an adapter of bert: unload it first" in answer["error"]) == (400, True)


def test_a_request_names_an_adapter_as_its_model(server: LocalServer, made: Made) -> None:
    for name in ("formal", "casual"):
        assert repository(server, name, "load")[0] == 200
    assert "expected 'formal', which the request names as its model" in ask(server, "casual", "formal")[1]
    assert [get(server.http, f"/v2/models/formal/versions/{number}/ready")[0] for number in (1, 2)] == [200, 404]
    assert post(server.http, "/v2/repository/models/formal/update", b"{}")[0] >= 400
    with Client("grpc", server) as client:
        for name in ("formal", "casual"):
            assert client.raw.is_model_ready(name)
            assert client.config(name)["name"] == client.metadata(name)["name"] == "bert"
            [found] = client.ask(name, {"input_ids": IDS.numpy(), "attention_mask": numpy.ones_like(IDS)}).values()
            numpy.testing.assert_allclose(found, made.answers[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("option", ["--adapter", "--adapter-folder"])
def test_an_adapter_of_several_entry_points_changes_in_all(option: str, tmp_path: Path) -> None:
    bundle = export(0, tmp_path / "autoencoder.stagepack")
    lora = write_lora(Autoencoder().eval(), tmp_path / "lora", {"layers.1": 2})
    (folder := tmp_path / "adapters").mkdir()
    adapter = stagepack.write_adapter(bundle, lora, out=folder / "x").path
    value, actions = (adapter, ("unload",)) if option == "--adapter" else (folder, ("load", "unload", "load"))
    with local_server([bundle.path], option, str(value), *EXPLICIT) as server:
        models = server.control.models.serving
        assert [model.adapters.names for model in models] == [("x",) if option == "--adapter" else ()] * 2
        for action in actions:
            assert repository(server, "x", action) == (200, {})
            assert [model.adapters.names for model in models] == [("x",) if action == "load" else ()] * 2


def test_a_polled_folder_is_followed(made: Made, folder: Path) -> None:
    shutil.move(folder / "third", folder.parent / "third")
    (folder / "broken").mkdir()
    (folder / "broken" / "manifest.json").write_text("{}")
    options = ("--adapter-folder", str(folder), *POLL, "--poll-s", "0.1")
    with local_server([made.bundle], *options) as server:
        numpy.testing.assert_allclose(ask(server, "formal"), made.answers["formal"], rtol=1e-6, atol=1e-6)
        shutil.move(folder.parent / "third", folder / "third")
        wait_until(lambda: "third" in server.control.models.adapter_names)
        shutil.rmtree(folder / "casual")
        wait_until(lambda: "casual" not in server.control.models.adapter_names)
        shutil.rmtree(folder / "formal")
        shutil.copytree(made.adapters / "casual", folder / "formal")
        wait_until(lambda: numpy.allclose(ask(server, "formal"), made.answers["casual"], rtol=1e-6, atol=1e-6))
        entries = {entry["name"]: entry for entry in post(server.http, "/v2/repository/index", b"")[1]}
        assert entries["broken"]["state"] == "UNAVAILABLE"
        assert "refused: " in entries["broken"]["reason"]
        status, text = lora(server, "unload", lora_name="formal")
        assert (status, "--model-control explicit" in text) == (403, True)


def test_a_delta_that_an_adapter_kept_back_is_taken_when_it_is_gone(made: Made, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    options = ("--adapter-folder", str(folder), *EXPLICIT, "--watch-deltas", str(tmp_path / "steps"))
    with local_server([made.bundle], *options) as server:
        assert repository(server, "formal", "load")[0] == 200
        [model] = server.control.models.serving
        state = make_model("bert").state_dict()
        delta = stagepack.delta(
            made.bundle, state | {"classifier.bias": state["classifier.bias"] + 1}, out=tmp_path / "d"
        )
        delta.path.rename(tmp_path / "steps" / "1")
        wait_until(lambda: server.control.updates._seen)
        assert model.pipeline.version != delta.result
        assert repository(server, "formal", "unload")[0] == 200
        wait_until(lambda: model.pipeline.version == delta.result)
        numpy.testing.assert_allclose(ask(server, None), made.answers[None] + 1, rtol=1e-6, atol=1e-6)


def test_the_index_lists_models_while_the_folder_cannot_be_read(made: Made, server: LocalServer, folder: Path) -> None:
    shutil.copytree(made.adapters / "formal", folder / "bert")  # the name of the model
    entries = post(server.http, "/v2/repository/index", b"")[1]
    assert [entry["state"] for entry in entries if entry["name"] == "bert"] == ["READY"]
    folder.rename(folder.parent / "gone")
    status, entries = post(server.http, "/v2/repository/index", b"")[:2]
    assert (status, [entry["name"] for entry in entries]) == (200, ["bert"])


def test_a_server_refuses_adapters_that_cannot_be_loaded_or_unloaded(made: Made, folder: Path) -> None:
    serve = functools.partial(run, "serve", str(made.bundle))
    assert "requires --model-control" in serve("--adapter-folder", str(folder)).output
    for options in (("--adapter", str(folder / "formal")), ("--adapter-folder", str(folder), *POLL)):
        assert "takes no delta while adapters are loaded" in serve(*options, "--watch-deltas", str(folder)).output


class Load:
    """Requests of several threads, each of which has the answer of the adapter that it names, or is refused for its name."""

    def __init__(self, server: AnyServer, made: Made) -> None:
        self._server, self._made = server, made
        self._has_ended = threading.Event()
        self.counts, self.faults = Counter[str](), list[str]()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(4)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads)
        assert self.faults == []

    def _run(self, seed: int) -> None:
        draw = random.Random(seed)  # noqa: S311 - the same names in each run
        while not self._has_ended.is_set():
            name = draw.choice((None, *NAMES))
            found = ask(self._server, name)
            if isinstance(found, tuple):
                self.counts["refused"] += 1
                if found[0] != 400 or name is None or f"found {name!r}" not in found[1]:
                    self.faults.append(f"{name}: {found}")
            else:
                self.counts[str(name)] += 1
                if not numpy.allclose(found, self._made.answers[name], rtol=1e-5, atol=1e-5):
                    others = [other for other, answer in self._made.answers.items() if numpy.allclose(found, answer)]
                    self.faults.append(f"{name}: the answer of {others}")


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--processes", "2"), marks=[pytest.mark.process, pytest.mark.slow])]
)
def test_requests_while_adapters_are_loaded_and_unloaded(made: Made, folder: Path, options: Sequence[str]) -> None:
    draw, loaded, rounds = random.Random(0), set[str](), 30  # noqa: S311 - the same names in each run
    with serving([made.bundle], "--adapter-folder", str(folder), *EXPLICIT, *options) as server:
        with Load(server, made) as load:
            end_time = time.monotonic() + 60
            kinds = ("None", "refused", *NAMES)
            while (rounds > 0 or not all(load.counts[kind] for kind in kinds)) and time.monotonic() < end_time:
                name, rounds = draw.choice(NAMES), rounds - 1
                assert repository(server, name, "unload" if name in loaded else "load") == (200, {})
                loaded ^= {name}
        assert all(load.counts[kind] for kind in kinds), load.counts
