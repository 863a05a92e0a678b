"""Texts are generated with adapters: each text of a batch with its own, in a pipeline and over the APIs of a server."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import PreTrainedModel

import stagepack
from stagepack.errors import InputError
from stagepack.roads.onnx import add_onnx
from tests.adapters.lora import adapted, write_lora
from tests.adapters.models import make_model
from tests.serve.local_server import LocalServer, local_server, refusal
from tests.serve.servers import get, post_json
from tests.text.generating_families import family_bundle, generated_by_transformers, make_prompts
from tests.text.generating_families import make_model as generating_model
from tests.text.generating_model import tokenizer

PROMPTS = torch.tensor([[5, 9, 31], [7, 8, 9], [3, 3, 4]])
RANKS = {
    "first": {"model.layers.0.self_attn.q_proj": 4, "lm_head": 3},
    "second": {"model.layers.1.mlp.down_proj": 2, "model.embed_tokens": 2, "lm_head": 1},
}
NEW_TOKENS = 6


def continued(model: PreTrainedModel, prompt: torch.Tensor) -> list[int]:
    """The likeliest tokens after a prompt, without a cache."""
    tokens = prompt[None]
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    found: list[int] = tokens[0, prompt.shape[0] :].tolist()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that generates, as a bundle, with two adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    model = make_model("llama")
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text(tokenizer().to_str())
    bundle = add_onnx(stagepack.export(folder / "model", out=folder / "llama.stagepack", stages=2, generate=32)).bundle
    for seed, (name, ranks) in enumerate(RANKS.items()):
        lora = write_lora(model, folder / f"lora-{name}", ranks, seed, lora_alpha=64)
        stagepack.write_adapter(bundle, lora, out=folder / name)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str | None, list[list[int]]]:
    """The new tokens of each prompt by adapter."""
    model = make_model("llama")
    answers: dict[str | None, list[list[int]]] = {None: [continued(model, prompt) for prompt in PROMPTS]}
    for name in RANKS:
        with adapted(model, folder / f"lora-{name}"):
            answers[name] = [continued(model, prompt) for prompt in PROMPTS]
    assert len({str(texts) for texts in answers.values()}) == len(answers)
    return answers


RUNTIMES = ["torch", pytest.param("onnxruntime", marks=pytest.mark.slow)]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_each_text_of_a_batch_has_its_own_adapter(runtime: str, folder: Path, expected: Any) -> None:
    adapters = [folder / name for name in RANKS]
    pipeline = stagepack.load(folder / "llama.stagepack", adapters=adapters, runtime=runtime)
    for adapter in ("first", None, ["second", None, "first"]):
        names = adapter if isinstance(adapter, list) else [adapter] * 3
        found = pipeline.generate(PROMPTS, max_new_tokens=NEW_TOKENS, adapter=adapter)
        assert found[:, 3:].tolist() == [expected[name][row] for row, name in enumerate(names)]
    with pytest.raises(InputError, match="expected one of first, second, or None for none, found 'third'"):
        pipeline.generate(PROMPTS, max_new_tokens=2, adapter="third")


@pytest.fixture(scope="module", params=RUNTIMES)
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[LocalServer]:
    options = [word for name in RANKS for word in ("--adapter", str(folder / name))]
    options += ["--runtime", request.param]
    with local_server([folder / "llama.stagepack"], *options) as server:
        yield server


def test_a_model_of_openai_names_an_adapter(server: LocalServer, expected: Any) -> None:
    for name, model in ((None, "llama"), ("first", "first"), ("second", "second")):
        status, answer = post_json(
            server,
            "/v2/models/llama/generate",
            input_ids=PROMPTS[1].tolist(),
            max_tokens=NEW_TOKENS,
            temperature=0,
            **({} if name is None else {"adapter": name}),
        )
        assert (status, answer["output_ids"]) == (200, expected[name][1])
        fields = {"prompt": PROMPTS[1].tolist(), "max_tokens": NEW_TOKENS, "temperature": 0, "logprobs": 1}
        status, answer = post_json(server, "/v1/completions", model=model, **fields)
        assert (status, answer["model"]) == (200, model)
    status, answer = post_json(server, "/v1/completions", model="third", prompt=[1], max_tokens=1)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, answer = post_json(server, "/v2/models/llama/generate", input_ids=[1], adapter="third")
    assert status == 400
    assert "expected one of its adapters, first, second, found 'third'" in answer["error"]


def test_texts_of_several_adapters_are_generated_at_once(server: LocalServer, expected: Any) -> None:
    jobs = [(name, row) for _ in range(4) for name in expected for row in range(3)]

    def ask(job: tuple[str | None, int]) -> Any:
        name, row = job
        fields = {} if name is None else {"adapter": name}
        return post_json(
            server,
            "/v2/models/llama/generate",
            input_ids=PROMPTS[row].tolist(),
            max_tokens=NEW_TOKENS,
            temperature=0,
            **fields,
        )[1]["output_ids"]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, jobs))
    assert found == [expected[name][row] for name, row in jobs]


def test_adapters_are_listed_as_models(server: LocalServer) -> None:
    listed = json.loads(get(server.http, "/v1/models")[1])["data"]
    assert {model["id"]: model.get("parent") for model in listed} == {
        "llama": None,
        "first": "llama",
        "second": "llama",
    }
    assert json.loads(get(server.http, "/v1/models/second")[1])["parent"] == "llama"


def test_a_server_refuses_adapters_that_it_cannot_run(folder: Path, tmp_path: Path) -> None:
    model = make_model("llama")
    lora = write_lora(model, tmp_path / "lora", RANKS["first"], replaced={"model.norm.weight": torch.zeros(32)})
    stagepack.write_adapter(folder / "llama.stagepack", lora, out=tmp_path / "whole")
    line = refusal(folder / "llama.stagepack", "--adapter", tmp_path / "whole")
    assert (
        "llama: the adapter 'whole' replaces whole weights, and texts of several adapters share calls: merge it" in line
    )
    other = stagepack.recut(folder / "llama.stagepack", out=tmp_path / "recut.stagepack", stages=1)
    line = refusal(other.path, "--adapter", folder / "first")
    assert "--adapter first: was made for none of the bundles" in line
    line = refusal(f"first={folder / 'llama.stagepack'}", "--adapter", folder / "first")
    assert "found 'first', which is a model and an adapter of first: pass --adapter NAME=FOLDER" in line


def test_a_request_of_the_protocol_names_its_adapter(tmp_path: Path) -> None:
    model = make_model("bert")
    model.save_pretrained(tmp_path / "model")
    bundle = stagepack.export(tmp_path / "model", out=tmp_path / "bert.stagepack", stages=2)
    lora = write_lora(model, tmp_path / "lora", {"bert.encoder.layer.0.attention.self.query": 4}, lora_alpha=64)
    stagepack.write_adapter(bundle, lora, out=tmp_path / "a")
    arrays = {"input_ids": PROMPTS.numpy(), "attention_mask": numpy.ones((3, 3), numpy.int64)}
    inputs = [
        {"name": name, "shape": array.shape, "datatype": "INT64", "data": array.tolist()}
        for name, array in arrays.items()
    ]
    with torch.no_grad():
        answers: dict[str | None, torch.Tensor] = {
            None: model(input_ids=PROMPTS, attention_mask=torch.ones_like(PROMPTS)).logits
        }
        with adapted(model, lora):
            answers["a"] = model(input_ids=PROMPTS, attention_mask=torch.ones_like(PROMPTS)).logits
    with local_server([bundle.path], "--adapter", str(tmp_path / "a")) as server:
        for name, expected in answers.items():
            fields: dict[str, Any] = {} if name is None else {"parameters": {"adapter": name}}
            status, answer = post_json(server, "/v2/models/bert/infer", inputs=inputs, **fields)
            assert status == 200, answer
            found = numpy.array(answer["outputs"][0]["data"], numpy.float32).reshape(expected.shape)
            numpy.testing.assert_allclose(found, numpy.asarray(expected), rtol=1e-6, atol=1e-6)

        def ask(name: str | None) -> Any:
            parameters: dict[str, Any] = {} if name is None else {"parameters": {"adapter": name}}
            return post_json(server, "/v2/models/bert/infer", inputs=inputs, **parameters)[1]["outputs"][0]["data"]

        jobs = [None, "a"] * 16
        with ThreadPoolExecutor(8) as pool:  # joined into batches of several adapters
            for name, data in zip(jobs, pool.map(ask, jobs), strict=True):
                found = numpy.array(data, numpy.float32).reshape(answers[name].shape)
                numpy.testing.assert_allclose(found, numpy.asarray(answers[name]), rtol=1e-5, atol=1e-5)
        status, answer = post_json(server, "/v2/models/bert/infer", inputs=inputs, parameters={"adapter": "b"})
        assert status == 400
        assert "expected one of a, or None for none, found 'b'" in answer["error"]


def test_an_encoder_has_the_adapter_of_its_decoder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle, model = family_bundle(tmp_path_factory, "t5"), generating_model("t5")
    prompts = make_prompts("t5", 4)
    adapters: dict[str, Path] = {}
    expected: dict[str | None, Any] = {
        None: generated_by_transformers("t5", model, prompts, 0, max_new_tokens=NEW_TOKENS)
    }
    for seed, side in enumerate(("encoder", "decoder")):
        ranks = {f"{side}.block.{layer}.layer.0.SelfAttention.{name}": 4 for layer in (0, 1) for name in "qvo"}
        lora = write_lora(model, tmp_path / f"lora-{side}", ranks, seed, lora_alpha=64)
        adapters[side] = stagepack.write_adapter(bundle, lora, out=tmp_path / side).path
        with adapted(model, lora):
            expected[side] = generated_by_transformers("t5", model, prompts, 0, max_new_tokens=NEW_TOKENS)
    pipelines = stagepack.load_entry_points(bundle, adapters=adapters)
    rows: list[str | None] = ["encoder", None, "decoder", "encoder"]
    expected_rows = [expected[name][row].tolist() for row, name in enumerate(rows)]
    for name, tokens in expected.items():
        assert pipelines.generate(*prompts.values(), max_new_tokens=NEW_TOKENS, adapter=name)[:, 1:].equal(tokens)
    assert len({str(tokens) for tokens in expected.values()}) == 3
    mixed = pipelines.generate(*prompts.values(), max_new_tokens=NEW_TOKENS, adapter=rows)
    assert mixed[:, 1:].tolist() == expected_rows
    with pytest.raises(InputError, match="expected an encoder that is loaded with the adapters of its decoder"):
        pipelines.decode.generate(
            *prompts.values(), encoder=stagepack.load_entry_points(bundle).encode, adapter="decoder"
        )
