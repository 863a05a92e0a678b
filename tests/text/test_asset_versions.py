"""Updates change tokenizers, chat templates and settings of generation with the weights: each text has those of one version."""

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest

import stagepack
from stagepack_text import token_texts
from tests.sentence_models import HIDDEN, TEXTS, sentence_model, sentence_transformers
from tests.serve.local_server import LocalServer, local_server, serving
from tests.serve.servers import AnyServer, get, post
from tests.text.generating_families import POSITIONS, make_model
from tests.text.generating_model import CHAT_TEMPLATE, tokenizer
from tests.waiting import wait_until

TEXT, ROWS, MODEL = "A cat", 4, "qwen"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "temperature": 0}


def other_tokenizer() -> str:
    """A tokenizer with the same tokens in another order."""
    fields = json.loads(tokenizer().to_str())
    vocabulary = fields["model"]["vocab"]
    fields["model"]["vocab"] = {word: token if token < 2 else 259 - token for word, token in vocabulary.items()}
    return json.dumps(fields)


def write_assets(folder: Path, **assets: str) -> list[Path]:
    folder.mkdir(parents=True)
    for name, content in assets.items():
        (folder / name.replace("__", ".")).write_text(content)
    return [*folder.iterdir()]


def copied(bundle: Path, out: Path, **assets: str) -> Path:
    """A bundle with other assets."""
    shutil.copytree(bundle, out)
    stagepack.add_assets(out, write_assets(out.parent / f"assets-{out.name}", **assets), overwrite=True)
    return out


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundles `old` and `new`, the delta `step` between them, and the bundle `broken`, whose tokenizer cannot be read."""
    folder = tmp_path_factory.mktemp("versions")
    model = make_model("qwen3")
    model.generation_config.eos_token_id = None
    assets = write_assets(folder / "assets", tokenizer__json=tokenizer().to_str(), chat_template__jinja=CHAT_TEMPLATE)
    old = folder / "old"
    stagepack.export(model, out=old, stages=2, generate=POSITIONS, generate_batch=ROWS, assets=assets)
    new = copied(
        old,
        folder / "new",
        tokenizer__json=other_tokenizer(),
        chat_template__jinja=f"Hello! {CHAT_TEMPLATE}",
        generation_config__json=json.dumps({"max_new_tokens": 5}),
    )
    stagepack.delta(old, new, out=folder / "step")
    copied(old, folder / "broken", tokenizer__json='{"version": "2.0"}')
    return folder


def test_a_pipeline_reads_and_writes_texts_as_its_version_does(versions: Path) -> None:
    expected = [stagepack.load(versions / name).generate(TEXT) for name in ("old", "new")]
    pipeline = stagepack.load(versions / "old")
    found = [pipeline.generate(TEXT)]
    pipeline.update(versions / "step", keep_previous=True)
    found.append(pipeline.generate(TEXT))
    pipeline.rollback()
    assert [*found, pipeline.generate(TEXT)] == [*expected, expected[0]]
    assert len(expected[1]) < len(expected[0])


def update(server: AnyServer, source: str | None, **parameters: Any) -> tuple[int, Any]:
    parameters |= {"rollback": True} if source is None else {"source": source}
    body = json.dumps({"parameters": parameters})
    status, answer, _ = post(server.http, f"/v2/repository/models/{MODEL}/update", body)
    return status, answer


def ask(server: AnyServer, **fields: Any) -> tuple[str, str, dict[str, int]]:
    """The version that answers, its text and what it counts."""
    path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
    body = {"model": MODEL, "temperature": 0, **fields} if "prompt" in fields else CHAT | fields
    status, answer, _ = post(server.http, path, json.dumps(body))
    assert status == 200, answer
    [choice] = answer["choices"]
    return answer["weight_version"], choice.get("text") or choice["message"]["content"], answer["usage"]


def options(versions: Path) -> tuple[str, ...]:
    return "--update-folder", str(versions), "--model-control", "explicit"


def check_served_versions(server: AnyServer, versions: Path) -> None:
    answers = []
    for source in ("", "step", None, "new", "old"):
        if source != "":
            status, answer = update(server, source, keep_previous=source == "step")
            assert status == 200, answer
        answers.append((ask(server, max_tokens=7), ask(server)[2]["completion_tokens"], ask(server, prompt=TEXT)))
    old, new = answers[:2]
    assert answers == [old, new, old, new, old]
    for name, (chat, default_count, completion) in zip(("old", "new"), (old, new), strict=True):
        pipeline = stagepack.load(versions / name)
        whole = pipeline.generate(TEXT, max_new_tokens=16, do_sample=False)
        assert completion[:2] == (pipeline.version, whole.removeprefix(TEXT))
        length = len(f"<user>{TEXT}<assistant>") + (len("Hello! ") if name == "new" else 0)
        assert chat[2]["prompt_tokens"] == length
        assert default_count == (5 if name == "new" else POSITIONS + 1 - length)


def test_a_server_reads_and_writes_texts_as_its_version_does(versions: Path) -> None:
    with local_server([f"{MODEL}={versions / 'old'}"], *options(versions)) as server:
        check_served_versions(server, versions)


@pytest.mark.process
@pytest.mark.slow
def test_a_server_over_processes_reads_and_writes_texts_as_its_version_does(versions: Path) -> None:
    with serving([f"{MODEL}={versions / 'old'}"], *options(versions), "--processes", "2") as server:
        check_served_versions(server, versions)


@pytest.fixture
def held(versions: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LocalServer, threading.Event]]:
    """A server whose calls wait until an event is set."""
    goes_on = threading.Event()
    with local_server([f"{MODEL}={versions / 'old'}"], *options(versions)) as server:
        model = server.control.models.find(MODEL, "")
        call = model.call

        async def call_when_set(*arguments: Any, **named: Any) -> Any:
            answer = await call(*arguments, **named)
            while not goes_on.is_set():
                await asyncio.sleep(0.01)
            return answer

        monkeypatch.setattr(model, "call", call_when_set)
        yield server, goes_on
        goes_on.set()


def test_texts_keep_their_tokenizer_and_those_that_wait_are_refused(
    held: tuple[LocalServer, threading.Event], versions: Path
) -> None:
    server, goes_on = held
    old = stagepack.load(versions / "old")
    [generators] = server.control.models.find(MODEL, "").parts.values()
    body = json.dumps({"model": MODEL, "prompt": TEXT, "temperature": 0, "max_tokens": 16})
    with ThreadPoolExecutor(ROWS + 1) as pool:
        begun = [pool.submit(ask, server, prompt=TEXT, max_tokens=16) for _ in range(ROWS)]
        wait_until(lambda: generators.text_count == ROWS)
        waiting = pool.submit(post, server.http, "/v1/completions", body)
        wait_until(lambda: generators.text_count == ROWS + 1)
        assert update(server, "new")[0] == 200
        status, answer, headers = waiting.result(30)
        assert (status, headers["retry-after"]) == (503, "1"), answer
        assert "the tokenizer, the chat template or the settings of generation were updated" in str(answer)
        goes_on.set()
        whole = old.generate(TEXT, max_new_tokens=16)
        assert {text.result()[:2] for text in begun} == {(old.version, whole.removeprefix(TEXT))}
    assert ask(server, prompt=TEXT)[0] == stagepack.open(versions / "new").digest


def test_an_update_whose_tokenizer_cannot_be_read_changes_nothing(versions: Path) -> None:
    with local_server([f"{MODEL}={versions / 'old'}"], *options(versions)) as server:
        before = ask(server, prompt=TEXT)
        status, answer = update(server, "broken")
        assert status == 400
        assert "not updated" in str(answer)
        assert "tokenizer.json" in str(answer)
        assert ask(server, prompt=TEXT) == before
        status, answer, _ = get(server.http, "/v1/models")
        assert (status, [model["id"] for model in json.loads(answer)["data"]]) == (200, [MODEL])


def test_tokenizers_are_read_beside_the_event_loop(versions: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    loops = list[Any]()
    errors = token_texts.tokenizer_errors

    def record(what: str) -> Any:
        if what.endswith("tokenizer.json"):
            loops.append(asyncio._get_running_loop())
        return errors(what)

    monkeypatch.setattr("stagepack_text.prompts.tokenizer_errors", record)
    with local_server([f"{MODEL}={versions / 'old'}"], *options(versions)) as server:
        loops.clear()
        for source in ("new", None, "new"):
            assert update(server, source, keep_previous=True)[0] == 200
            ask(server, prompt=TEXT)
            assert get(server.http, "/v1/models")[0] == 200
    assert loops == [None]  # the version that is kept has its tokenizer


def test_embeddings_follow_the_tokenizer_and_the_prompts(tmp_path: Path) -> None:
    modules = sentence_transformers().sentence_transformer.modules
    old = tmp_path / "old"
    stagepack.export(sentence_model(tmp_path / "model", modules.Pooling(HIDDEN)), out=old)
    stored = stagepack.open(old)
    name = "config_sentence_transformers.json"
    settings = json.loads(stored.read(name)) if name in stored.files else {}
    prompts = {"prompts": {"query": "a b "}, "default_prompt_name": "query"}
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / name).write_text(json.dumps(settings | prompts))
    shutil.copytree(old, tmp_path / "new")
    stagepack.add_assets(tmp_path / "new", [tmp_path / "prompts" / name], overwrite=True)
    expected = [stagepack.load(tmp_path / version).encode(TEXTS).numpy() for version in ("old", "new")]
    assert not numpy.allclose(*expected)
    pipeline = stagepack.load(old)
    with local_server([f"texts={old}"]) as server:
        model = server.control.models.find("texts", "")
        for number, version in enumerate(("old", "new", "old")):
            if number:
                pipeline.update(tmp_path / version)
                model.pipeline.update(tmp_path / version)
            numpy.testing.assert_allclose(pipeline.encode(TEXTS), expected[number % 2], rtol=1e-4, atol=1e-5)
            status, answer, _ = post(server.http, "/v1/embeddings", json.dumps({"model": "texts", "input": TEXTS}))
            assert (status, answer["weight_version"]) == (200, pipeline.version)
            found = [entry["embedding"] for entry in answer["data"]]
            numpy.testing.assert_allclose(found, expected[number % 2], rtol=1e-4, atol=1e-5)
