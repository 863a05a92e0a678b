"""The weights of a model are updated while a server answers: by a request, and from a folder; each answer names its version."""

import asyncio
import itertools
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy
import pytest
import tritonclient.grpc as triton_grpc

import stagepack
from stagepack.deltas.patches import MOST_DELTAS
from stagepack_serving.server import watched_deltas
from stagepack_serving.server.adapter_control import AdapterControl
from stagepack_serving.server.bundle_listings import UnreadableModel, repository_bundles
from stagepack_serving.server.event_loop_threads import run_in_thread
from tests.adapters.lora import write_tiny_adapter
from tests.conformance.vectors import TINY_DELTA
from tests.deltas.conftest import Trainer
from tests.serve.local_server import LocalServer, local_server
from tests.serve.servers import AnyServer, Client, post, stagepack_server
from tests.serve.version_models import X, count, export_counter, export_scale
from tests.waiting import wait_until

EXPLICIT = ("--model-control", "explicit")
UPDATE = "/v2/repository/models/scale/update"


class Steps(NamedTuple):
    """Versions of a model whose answers say which one it is: the folders of the first bundle, and of updates from it."""

    bundle: Path
    updates: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    bundles = [export_scale(folder / f"{factor:.0f}.stagepack", factor) for factor in (1.0, 2.0, 3.0, 4.0)]
    for number, (old, new) in enumerate(itertools.pairwise(bundles), 2):
        stagepack.delta(old, new, out=folder / f"step-{number}", version=f"step {number}")
    return folder


@pytest.fixture
def steps(made: Path, tmp_path: Path) -> Steps:
    updates = tmp_path / "updates"
    updates.mkdir()
    for name in ("step-2", "step-3", "4.stagepack"):
        shutil.copytree(made / name, updates / name)
    return Steps(made / "1.stagepack", updates)


@pytest.fixture
def server(steps: Steps) -> Iterator[LocalServer]:
    options = ("--update-folder", str(steps.updates), "--model-control", "explicit")
    with local_server([f"scale={steps.bundle}"], *options) as server:
        yield server


def update(server: AnyServer, **parameters: Any) -> tuple[int, Any]:
    status, answer, _ = post(server.http, UPDATE, json.dumps({"parameters": parameters}))
    return status, answer


def ask(server: AnyServer) -> tuple[float, str]:
    """The factor of an answer, and the version that its body and its header name."""
    body = {"inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [1.0] * 6}]}
    status, answer, headers = post(server.http, "/v2/models/scale/infer", json.dumps(body))
    assert status == 200, answer
    version = answer["parameters"]["weight_version"]
    assert headers["x-model-version"] == version
    return answer["outputs"][0]["data"][0], version


def test_clients_update_and_roll_back_by_names(server: LocalServer, steps: Steps) -> None:
    digest = stagepack.open(steps.bundle).digest
    assert ask(server) == (1.0, digest)
    status, answer = update(server, source="step-2")
    assert status == 200, answer
    assert set(answer.pop("seconds")) == {"fetch", "verify", "stage", "switch", "pause"}
    assert answer == {"model_name": "scale", "model_version": "1", "weight_version": "step 2", "previous": digest}
    assert ask(server) == (2.0, "step 2")
    assert update(server, source="step-3", keep_previous=True, weight_version="third é")[0] == 200
    body = {"inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [1.0] * 6}]}
    _, answer, headers = post(server.http, "/v2/models/scale/infer", json.dumps(body))
    assert (answer["parameters"]["weight_version"], headers["x-model-version"]) == ("third é", "third %C3%A9")
    assert update(server, rollback=True)[1]["weight_version"] == "step 2"
    assert ask(server) == (2.0, "step 2")
    assert update(server, rollback=True)[0] == 400
    assert update(server, source="4.stagepack", weight_version="whole")[0] == 200
    assert ask(server) == (4.0, "whole")
    scraped = server.http.get("/metrics").text
    assert 'stagepack_update_seconds{model="scale",part="stage",version="1"}' in scraped
    digest = stagepack.open(steps.updates / "4.stagepack").digest
    assert f'stagepack_model_info{{digest="{digest}",model="scale",version="1"}} 1.0' in scraped


def test_answers_over_grpc_name_their_version(server: LocalServer) -> None:
    update(server, source="step-2")
    with Client("grpc", server) as client:
        inputs = triton_grpc.InferInput("x", [2, 3], "FP32")
        inputs.set_data_from_numpy(numpy.asarray(X))
        answer = client.raw.infer("scale", [inputs])
        assert answer.as_numpy("y")[0, 0] == 2
        assert answer.get_response().parameters["weight_version"].string_param == "step 2"


def test_what_the_operator_does_not_permit_is_refused(server: LocalServer, steps: Steps, made: Path) -> None:
    shutil.copytree(made / "step-4", steps.updates / "step-4")
    (steps.updates / "empty").mkdir()
    outside = os.path.relpath(made / "step-2", steps.updates)
    for source in (
        str(made / "step-2"),
        outside,
        "..",
        ".",
        "step-2/../step-2",
        "empty",
        "other",
        "",
        "x" * 4000,
        "https://x/y",
    ):
        status, answer = update(server, source=source)
        assert (status, "no version" in answer["error"]) == (404, True), (source, answer)
    status, answer = update(server, source="step-4")
    assert (status, "expected a delta on the bundle that runs" in answer["error"]) == (400, True)
    body = {"inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [1.0] * 6}]}
    status, answer, _ = post(server.http, "/v2/models/scale/infer", json.dumps(body | {"parameters": {"adapter": "a"}}))
    assert (status, "the model has no adapters, found 'a'" in answer["error"]) == (400, True)
    for parameters in ({}, {"source": "step-2", "rollback": True}, {"source": 3}, {"path": "step-2"}):
        assert update(server, **parameters)[0] == 400
    assert update(server, source="step-2", weight_version="a\nb")[0] == 400
    assert (
        post(server.http, "/v2/repository/models/other/update", json.dumps({"parameters": {"source": "step-2"}}))[0]
        == 404
    )
    assert ask(server)[0] == 1.0
    for options in ((), ("--update-folder", str(steps.updates))):
        with local_server([f"scale={steps.bundle}"], *options) as other:
            status, answer = update(other, source="step-2")
            assert (status, "--model-control explicit" in answer["error"]) == (403, True)
    with local_server([f"scale={steps.bundle}"], "--model-control", "explicit") as other:
        status, answer = update(other, source="step-2")
        assert (status, "--update-folder" in answer["error"]) == (403, True)


def test_deltas_are_taken_as_they_appear_in_the_order_of_their_bases(steps: Steps, made: Path) -> None:
    late = steps.updates / "step-3"
    held = late.rename(steps.updates.parent / "held")
    (steps.updates / "a-damaged").mkdir()
    shutil.copy(made / "step-2" / "manifest.json", steps.updates / "a-damaged")
    (steps.updates / "a-pipe").mkdir()
    os.mkfifo(steps.updates / "a-pipe" / "manifest.json")
    with local_server([f"scale={steps.bundle}"], "--watch-deltas", str(steps.updates)) as server:
        wait_until(lambda: ask(server) == (2.0, "step 2"))
        shutil.copytree(made / "step-4", steps.updates / "0-last")
        held.rename(late)
        wait_until(lambda: ask(server) == (4.0, "step 4"))


def test_a_step_that_was_taken_is_not_taken_again_after_a_rollback(steps: Steps) -> None:
    shutil.rmtree(steps.updates / "step-3")
    options = ("--watch-deltas", str(steps.updates), "--model-control", "explicit")
    with local_server([f"scale={steps.bundle}"], *options) as server:
        wait_until(lambda: ask(server) == (2.0, "step 2"))
        shutil.copytree(steps.bundle, steps.updates / "first")
        assert update(server, source="first", weight_version="first")[0] == 200
        time.sleep(1.5)
        assert ask(server) == (1.0, "first")


def test_a_step_that_a_client_has_taken_back_is_not_taken_by_the_watch(steps: Steps) -> None:
    steps.updates.rename(held := steps.updates.parent / "held")
    steps.updates.mkdir()
    options = ("--watch-deltas", str(steps.updates), "--model-control", "explicit")
    with local_server([f"scale={steps.bundle}"], *options) as server:
        (held / "step-2").rename(steps.updates / "step-2")
        assert update(server, source="step-2", keep_previous=True)[0] in (200, 400)  # the watch may be first
        wait_until(lambda: ask(server) == (2.0, "step 2"))
        shutil.copytree(steps.bundle, steps.updates / "first")
        assert update(server, source="first", weight_version="first")[0] == 200
        time.sleep(1.5)
        assert ask(server) == (1.0, "first")


def test_no_request_fails_while_weights_are_updated(server: LocalServer) -> None:
    expected = {"step 2": 2.0, "step 3": 3.0}
    has_ended, answers = threading.Event(), list[tuple[float, str]]()

    def call() -> None:
        while not has_ended.is_set():
            answers.append(ask(server))

    threads = [threading.Thread(target=call) for _ in range(4)]
    update(server, source="step-2")
    for thread in threads:
        thread.start()
    for number in range(10):
        if number % 2:
            assert update(server, rollback=True)[0] == 200
        else:
            assert update(server, source="step-3", keep_previous=True)[0] == 200
    has_ended.set()
    for thread in threads:
        thread.join()
    assert answers
    assert all(expected[version] == factor for factor, version in answers)


def test_sequences_finish_on_their_version(tmp_path: Path) -> None:
    for step in (1.0, 10.0):
        export_counter(tmp_path / f"{step}.stagepack", step)
    updates = tmp_path / "updates"
    shutil.copytree(tmp_path / "10.0.stagepack", updates / "ten")
    options = ("--update-folder", str(updates), "--model-control", "explicit")
    with local_server([f"scale={tmp_path / '1.0.stagepack'}"], *options) as server, Client("http", server) as client:
        assert count(client, "scale", 1, sequence_start=True) == 1
        assert update(server, source="ten")[0] == 200
        assert count(client, "scale", 1) == 2
        assert count(client, "scale", 2, sequence_start=True) == 10
        assert count(client, "scale", 1, sequence_end=True) == 3
        assert count(client, "scale", 1, sequence_start=True) == 10


def test_clients_update_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEPACK_CACHE", str(tmp_path / "cache"))
    trainer = Trainer(tmp_path)
    options = ("--update-folder", str(tmp_path), "--model-control", "explicit")
    with local_server([f"scale={trainer.first}"], *options) as server:
        for step in range(1, MOST_DELTAS + 3):
            status, answer = update(server, source=trainer.ship().name)
            assert status == 200, (step, answer)
        body = {"inputs": [{"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1.0] * 4}]}
        status, answer, _ = post(server.http, "/v2/models/scale/infer", json.dumps(body))
        assert status == 200, answer
        assert answer["outputs"][0]["data"] == pytest.approx(trainer.answer()[0].tolist())


def errors_that_name(path: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if str(path) in message and "cannot be read" in message]


def test_what_the_watch_cannot_read_is_named_once_and_the_others_go_on(
    steps: Steps, made: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unreadable = steps.updates / "0-unreadable"
    unreadable.symlink_to("x" * 300)  # no file system has a name of this length
    options = ("--watch-deltas", str(steps.updates), *EXPLICIT)
    with local_server([f"scale={steps.bundle}"], *options) as server:
        wait_until(lambda: ask(server) == (3.0, "step 3"))
        assert update(server, source=unreadable.name)[0] == 404
        shutil.copytree(made / "step-4", steps.updates / "step-4")
        wait_until(lambda: ask(server) == (4.0, "step 4"))
    assert len(errors_that_name(unreadable, caplog)) == 1
    # The folder of a model, too.
    own = steps.updates.parent / "others" / "scale"
    own.parent.mkdir()
    own.symlink_to("x" * 300)
    shutil.copytree(made / "step-2", own.parent / "step-2")
    with local_server([f"scale={steps.bundle}"], "--watch-deltas", str(own.parent)) as server:
        wait_until(lambda: ask(server) == (2.0, "step 2"))


def test_what_a_repository_cannot_read_is_named_once_and_the_others_go_on(
    steps: Steps, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(steps.bundle, repository / "scale" / "1")
    shutil.copytree(steps.bundle, repository / "other" / "1")
    unreadable = repository / "a-unreadable"
    unreadable.symlink_to("x" * 300)
    (repository / "bad name").symlink_to("x" * 300)
    with local_server([], "--model-repository", str(repository)) as server:
        assert ask(server)[0] == 1.0
    assert len(errors_that_name(unreadable, caplog)) == 1
    caplog.clear()
    with local_server(
        [], "--model-repository", str(repository), "--model-control", "poll", "--poll-s", "0.1"
    ) as server:
        assert ask(server)[0] == 1.0
        (other := repository / "other").rename(tmp_path / "other")
        other.symlink_to("x" * 300)
        wait_until(lambda: errors_that_name(other, caplog))
        shutil.copytree(steps.updates / "4.stagepack", repository / "scale" / "2")
        wait_until(lambda: ask(server)[0] == 4.0)
        # Its model goes on.
        assert {model.name for model in server.control.models.serving} == {"scale", "other"}
    assert len(errors_that_name(unreadable, caplog)) == 1
    assert len(errors_that_name(other, caplog)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_folders_without_permission_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for path in ("model/1", "steps/step", "adapters/adapter"):
            (root / path).mkdir(parents=True)
            (root / path / "manifest.json").write_text("{}")
        root.chmod(0o755)
        closed = [root / "model", root / "steps" / "step", root / "adapters" / "adapter"]
        for folder in closed:
            folder.chmod(0o700)
        deltas, adapters = (
            watched_deltas.DeltaFolder(root / "steps"),
            AdapterControl(cast("Any", None), root / "adapters", ()),
        )
        os.seteuid(65534)
        try:
            unreadable = repository_bundles(root)["model"]
            for _ in range(2):
                assert list(deltas.steps("model", "0" * 64)) == []
                assert adapters.listed() == {}
        finally:
            os.seteuid(0)
    assert isinstance(unreadable, UnreadableModel)
    assert str(closed[0]) in unreadable.reason
    assert [len(errors_that_name(folder, caplog)) for folder in closed[1:]] == [1, 1]


@pytest.mark.process
def test_a_server_over_processes_is_updated(steps: Steps) -> None:
    options = ("--processes", "1", "--update-folder", str(steps.updates), "--model-control", "explicit")
    with stagepack_server([f"scale={steps.bundle}"], *options) as server:
        assert update(server, source="step-2")[0] == 200
        assert ask(server) == (2.0, "step 2")


def test_a_thread_whose_result_nobody_waits_for_any_more_ends_without_an_error() -> None:
    """A server that stops cancels the watch, which may wait for a thread."""
    has_begun, may_end, threads = threading.Event(), threading.Event(), list[threading.Thread]()

    def work() -> None:
        threads.append(threading.current_thread())
        has_begun.set()
        may_end.wait()

    async def begin_and_cancel() -> None:
        task = asyncio.ensure_future(run_in_thread(work))
        await asyncio.to_thread(has_begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(begin_and_cancel())
    may_end.set()
    threads[0].join()  # pytest fails the test for an exception in a thread


def test_an_adapter_is_no_step_of_a_chain(tmp_path: Path) -> None:
    adapter = write_tiny_adapter(tmp_path / "a")
    assert stagepack.open_adapter(adapter).base == stagepack.open_delta(TINY_DELTA).base
    assert [watched_deltas._read_base(path) for path in (TINY_DELTA, adapter)] == [
        stagepack.open_delta(TINY_DELTA).base,
        "",
    ]
