"""Adapters are loaded and unloaded while texts are generated: a text finishes with the adapter that it began with."""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import stagepack
from tests.adapters.lora import write_lora
from tests.adapters.models import make_model
from tests.serve.local_server import LocalServer, local_server, serving
from tests.serve.servers import AnyServer, get, post, post_json
from tests.text.generating_families import family_bundle
from tests.text.generating_families import make_model as generating_model
from tests.text.generating_model import tokenizer
from tests.waiting import wait_until

PROMPT, NEW = [5, 9, 31], 24
NAMES = ("first", "second", "third")
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head")


class Made(NamedTuple):
    """A decoder, the folder of its adapters, and the new tokens by adapter."""

    bundle: Path
    adapters: Path
    tokens: dict[str | None, list[int]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("texts")
    model = make_model("llama")
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text(tokenizer().to_str())
    bundle = stagepack.export(folder / "model", out=folder / "llama.stagepack", stages=2, generate=32, generate_batch=4)
    (folder / "adapters").mkdir()
    for seed, name in enumerate(NAMES):
        lora = write_lora(model, folder / f"lora-{name}", dict.fromkeys(MODULES, 2 + seed), seed, lora_alpha=64)
        stagepack.write_adapter(bundle, lora, out=folder / "adapters" / name)
    pipeline = stagepack.load(bundle, adapters=[folder / "adapters" / name for name in NAMES])
    tokens = {
        name: pipeline.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, adapter=name)[0, len(PROMPT) :].tolist()
        for name in (None, *NAMES)
    }
    assert len({str(text) for text in tokens.values()}) == len(tokens)
    return Made(bundle.path, folder / "adapters", tokens)


@pytest.fixture
def server(made: Made) -> Iterator[LocalServer]:
    with served(made) as server:
        yield server


def served(made: Made, *options: str, serve: Any = local_server) -> Any:
    control = ("--adapter-folder", str(made.adapters), "--model-control", "explicit")
    return serve([made.bundle], *control, *options)


def change(server: AnyServer, name: str, action: str) -> None:
    status, answer, _ = post(server.http, f"/v2/repository/models/{name}/{action}", b"")
    assert status == 200, answer


def ask(server: AnyServer, name: str | None) -> Any:
    """The tokens of a text with an adapter, or why it is refused."""
    adapter = {} if name is None else {"adapter": name}
    fields = {"input_ids": PROMPT, "max_tokens": NEW, "temperature": 0}
    status, answer = post_json(server, "/v2/models/llama/generate", **fields, **adapter)
    return answer["output_ids"] if status == 200 else (status, answer["error"])


def test_adapters_are_models_of_openai_as_soon_as_they_are_loaded(server: LocalServer, made: Made) -> None:
    def complete(model: str) -> tuple[int, Any]:
        return post_json(server, "/v1/completions", model=model, prompt=PROMPT, max_tokens=1, temperature=0)

    def listed() -> dict[str, str | None]:
        models = json.loads(get(server.http, "/v1/models")[1])["data"]
        return {model["id"]: model.get("parent") for model in models}

    assert listed() == {"llama": None}
    change(server, "first", "load")
    body = json.dumps({"lora_name": "other", "lora_path": "second"})
    assert server.http.post("/v1/load_lora_adapter", content=body).status_code == 200
    assert listed() == {"llama": None, "first": "llama", "other": "llama"}
    assert complete("other")[0] == 200
    status, answer = complete("second")
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
    assert "this server has llama, with the adapters first, other" in answer["error"]["message"]
    change(server, "first", "unload")
    assert listed() == {"llama": None, "other": "llama"}
    assert complete("first")[0] == 404
    assert ask(server, "other") == made.tokens["second"]
    fields = {"input_ids": PROMPT, "max_tokens": NEW, "temperature": 0}
    status, answer = post_json(server, "/v2/models/other/generate", **fields)
    assert (status, answer["output_ids"], answer["model_name"]) == (200, made.tokens["second"], "llama")
    assert post_json(server, "/v2/models/other/generate", **fields, adapter="first")[0] == 400
    assert post_json(server, "/v2/models/first/generate", **fields)[0] == 404


def test_texts_under_way_finish_with_their_adapter(server: LocalServer, made: Made) -> None:
    change(server, "first", "load")
    fields = {"input_ids": PROMPT, "parameters": {"max_tokens": NEW, "temperature": 0, "adapter": "first"}}
    with server.http.stream("POST", "/v2/models/llama/generate_stream", content=json.dumps(fields)) as answer:
        lines = answer.iter_lines()
        events = [next(line for line in lines if line)]
        change(server, "first", "unload")
        change(server, "second", "load")
        assert ask(server, "second") == made.tokens["second"]
        assert ask(server, "first")[0] == 400
        events += [line for line in lines if line]
    tokens = [token for event in events for token in json.loads(event.removeprefix("data: "))["output_ids"]]
    assert tokens == made.tokens["first"]


def test_a_text_that_waits_is_refused_when_its_adapter_is_unloaded(made: Made) -> None:
    """The texts beside it are as they were."""
    with served(made) as server, ThreadPoolExecutor(8) as pool:
        change(server, "first", "load")
        change(server, "second", "load")
        [model] = server.control.models.serving
        [generator] = [part for part in model.parts.values() if hasattr(part, "_text_loop")]
        # The first call waits, with the texts that have the rows of the cache.
        gate, run = threading.Event(), model._executor._run_stage
        model._executor._run_stage = lambda *args: (gate.wait(30), run(*args))[1]
        running = [pool.submit(ask, server, name) for name in ("first", "second", "first", None)]
        wait_until(lambda: generator.text_count == 4)
        waiting = [pool.submit(ask, server, name) for name in ("second", None, "first")]
        wait_until(lambda: generator.text_count == 7)
        change(server, "second", "unload")
        gate.set()
        assert [text.result() for text in running] == [made.tokens[name] for name in ("first", "second", "first", None)]
        found = [answer.result() for answer in waiting]
        assert found[0] == (400, "llama: adapter: 'second' was unloaded before the text began")
        assert found[1:] == [made.tokens[None], made.tokens["first"]]


@pytest.mark.parametrize(
    ("options", "rounds"),
    [
        ((), 20),
        pytest.param((), 100, marks=pytest.mark.slow),
        pytest.param(("--processes", "2"), 50, marks=[pytest.mark.process, pytest.mark.slow]),
    ],
)
def test_texts_while_adapters_are_loaded_and_unloaded(made: Made, options: Sequence[str], rounds: int) -> None:
    draw, loaded, has_ended = random.Random(rounds), set[str](), threading.Event()  # noqa: S311 - the same in each run
    counts, faults = Counter[str](), list[Any]()

    def call(server: AnyServer, seed: int) -> None:
        drawn = random.Random(seed)  # noqa: S311 - the same names in each run
        while not has_ended.is_set():
            name = drawn.choice((None, *NAMES))
            found = ask(server, name)
            if isinstance(found, tuple):
                counts["refused"] += 1
                if found[0] != 400 or name is None or f"{name!r}" not in found[1]:
                    faults.append((name, found))
            else:
                counts[str(name)] += 1
                if found != made.tokens[name]:
                    faults.append((name, [other for other, tokens in made.tokens.items() if tokens == found], found))

    with served(made, *options, serve=serving) as server, ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(call, server, seed) for seed in range(6)]
        try:
            end_time = time.monotonic() + 120
            kinds = ("None", "refused", *NAMES)
            while (rounds > 0 or not all(counts[kind] for kind in kinds)) and time.monotonic() < end_time:
                name, rounds = draw.choice(NAMES), rounds - 1
                change(server, name, "unload" if name in loaded else "load")
                loaded ^= {name}
                time.sleep(0.03 * draw.random())
        finally:
            has_ended.set()
        for done in calls:
            done.result()
    assert faults == []
    assert all(counts[kind] for kind in kinds), counts


def test_an_encoder_and_its_decoder_take_adapters_together(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_pair(tmp_path, family_bundle(tmp_path_factory, "t5"))


@pytest.mark.process
@pytest.mark.slow
def test_an_encoder_and_its_decoder_in_processes_take_adapters_together(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_pair(tmp_path, family_bundle(tmp_path_factory, "t5"), "--processes", "1")


def check_pair(folder: Path, bundle: Path, *options: str) -> None:
    """Load and unload adapters that change an encoder, a decoder, and both, in Python and while clients ask for texts."""
    parts = {"encoder": ("encoder",), "decoder": ("decoder",), "both": ("encoder", "decoder")}
    (folder / "adapters").mkdir()
    for seed, (name, sides) in enumerate(parts.items()):
        ranks = {f"{side}.block.{layer}.layer.0.SelfAttention.q": 4 for side in sides for layer in (0, 1)}
        lora = write_lora(generating_model("t5"), folder / f"lora-{name}", ranks, seed, lora_alpha=640)
        stagepack.write_adapter(bundle, lora, out=folder / "adapters" / name)
    pipelines = stagepack.load_entry_points(bundle, adapters=[])
    expected: dict[str | None, list[int]] = {None: continued(pipelines)}
    for name in parts:
        assert pipelines.load_adapter(folder / "adapters" / name) == name
        assert pipelines.adapters == pipelines.encode.adapters == pipelines.decode.adapters == (name,)
        expected[name] = continued(pipelines, adapter=name)
        pipelines.unload_adapter(name)
    assert len({str(tokens) for tokens in expected.values()}) == 4
    control = ("--adapter-folder", str(folder / "adapters"), "--model-control", "explicit")
    with serving([f"pair={bundle}"], *control, *options) as server, ThreadPoolExecutor(4) as pool:

        def ask(name: str | None) -> Any:
            fields: dict[str, Any] = {"input_ids": PROMPT, "max_tokens": 8, "temperature": 0}
            adapter = {} if name is None else {"adapter": name}
            status, answer = post_json(server, "/v2/models/pair/generate", **fields, **adapter)
            return answer["output_ids"] if status == 200 else (status, answer["error"])

        for name in (*parts, *parts):
            texts = {other: pool.submit(ask, other) for other in (None, name)}
            change(server, name, "load")
            assert ask(name) == expected[name]
            metadata = [json.loads(get(server.http, f"/v2/models/{model}")[1]) for model in ("pair", "pair_encode")]
            assert [fields["parameters"]["adapters"] for fields in metadata] == [[name], [name]]
            entries = post(server.http, "/v2/repository/index", b"")[1]
            ready = [entry["reason"] for entry in entries if (entry["name"], entry["state"]) == (name, "READY")]
            assert [reason.removeprefix("adapter of ").split(", ") for reason in ready] == [["pair", "pair_encode"]]
            status, answer = get(server.http, f"/v2/models/{name}")[:2]
            assert (status, "name one of these models" in str(answer)) == (400, True)
            late = pool.submit(ask, name)
            change(server, name, "unload")
            assert texts[None].result() == expected[None]
            for found in (texts[name].result(), late.result()):
                assert found == expected[name] or (found[0] == 400 and repr(name) in found[1])
            assert ask(name)[0] == 400


def continued(pipelines: Any, **adapter: Any) -> list[int]:
    tokens: list[int] = pipelines.generate(torch.tensor([PROMPT]), max_new_tokens=8, **adapter)[0, 1:].tolist()
    return tokens
