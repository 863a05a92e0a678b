"""Models of transformers that generate: the tokens are those of its `generate`, in one process and over the server."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy
import openai
import pytest
import torch
import tritonclient.grpc
from transformers import PreTrainedTokenizerFast

import stagepack
from stagepack_loaders.generation.decoders import decoder_facts, generating_entry_point
from stagepack_loaders.generation.settings import read_settings
from stagepack_loaders.generation.token_loop import EncodedTexts, TokenLoop
from tests.serve.bundles import Bundles
from tests.serve.generating_families import (
    FAMILIES,
    POSITIONS,
    SEQ2SEQ,
    generated_by_transformers,
    make_model,
    make_prompts,
)
from tests.serve.generating_model import tokenizer, write_assets
from tests.serve.servers import Server, grpc_client, post, stagepack_server
from tests.serve.test_generation import events, stream_responses, text_input

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serve")]
COUNT = 24
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"do_sample": True, "temperature": 0.8, "top_k": 40})
SEED = 5


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    folder = tmp_path_factory.mktemp("families")
    options: dict[str, Any] = {"stages": 2, "generate": POSITIONS, "generate_batch": 4, "assets": write_assets(folder)}
    return {
        family: stagepack.export(make_model(family), out=folder / f"{family}.stagepack", **options).path
        for family in FAMILIES
    }


@pytest.fixture(scope="module", params=["one process", "processes"])
def server(bundles: Bundles, request: pytest.FixtureRequest) -> Iterator[Server]:
    families = FAMILIES if request.param == "one process" else ("llama", "t5")
    options = ["--allow-ops", "transformers", "--import", "transformers.integrations.moe"]
    options += ["--processes", "2"] if request.param == "processes" else []
    with stagepack_server([bundles[family] for family in families], *options) as server:
        yield server


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_has_the_tokens_of_transformers(bundles: Bundles, family: str, batch_size: int) -> None:
    bundle, model, prompts = stagepack.open(bundles[family]), make_model(family), make_prompts(family, batch_size)
    decoder_name = generating_entry_point(bundle)
    assert decoder_name is not None
    facts = decoder_facts(bundle.select(decoder_name).entry_point)
    assert facts is not None
    pipelines = stagepack.load_entry_points(bundle, allow_ops=["transformers"])
    mask = prompts.get("attention_mask")
    mask_array = None if mask is None else mask.numpy()
    for options in OPTIONS:
        expected = generated_by_transformers(family, model, prompts, SEED, max_new_tokens=COUNT, **options)
        settings = read_settings(bundle).override({"max_new_tokens": COUNT, "seed": SEED, **options})
        pipelines[decoder_name].reset_state()
        with torch.no_grad():
            if family in SEQ2SEQ:
                rows = pipelines["encode"](**prompts).numpy()
                first = settings.first_tokens(batch_size)
                loop = TokenLoop(facts, settings, first, None, EncodedTexts(rows, mask_array))
            else:
                loop = TokenLoop(facts, settings, prompts["input_ids"].numpy(), mask_array)
            begin_length = loop.tokens.shape[1]
            while not loop.is_finished:
                inputs = {name: torch.from_numpy(array) for name, array in loop.next_inputs().items()}
                loop.take(pipelines[decoder_name](**inputs).numpy())
        assert loop.tokens[:, begin_length:].tolist() == expected.tolist()


def prompt_of(family: str) -> tuple[dict[str, torch.Tensor], str, Any]:
    """One prompt: for transformers, and its name and its values for the server."""
    prompts = make_prompts(family, 1)
    name = "input_features" if "input_features" in prompts else "input_ids"
    return prompts, name, prompts[name][0].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", OPTIONS)
def test_the_server_generates_the_tokens_of_transformers(server: Server, family: str, options: dict[str, Any]) -> None:
    if family not in [model["name"] for model in server.facts["models"]]:
        pytest.skip("in processes, llama and t5 alone are served")
    prompts, name, values = prompt_of(family)
    model = make_model(family)
    expected = generated_by_transformers(family, model, prompts, SEED, max_new_tokens=COUNT, **options)[0].tolist()
    body = {name: values, "parameters": {"max_tokens": COUNT, "seed": SEED} | options}
    status, whole, _ = post(server.http, f"/v2/models/{family}/generate", json.dumps(body))
    assert (status, whole.get("output_ids")) == (200, expected), whole
    parts = events(server.http, f"/v2/models/{family}/generate_stream", body)
    assert [token for part in parts for token in part["output_ids"]] == expected
    text = tokenizer().decode(expected)
    assert "".join(part["text_output"] for part in parts) == whole["text_output"] == text
    array = prompts[name].numpy()
    datatype = "FP32" if name == "input_features" else "INT64"
    tensor = tritonclient.grpc.InferInput(name, array.shape, datatype).set_data_from_numpy(array)
    with contextlib.closing(grpc_client(server.grpc)) as client:
        responses = stream_responses(client, [tensor], model=family, parameters=body["parameters"])
    assert [int.from_bytes(response.raw_output_contents[1], "little") for response in responses] == expected


def test_features_of_another_size_are_refused(server: Server) -> None:
    if "whisper" not in [model["name"] for model in server.facts["models"]]:
        pytest.skip("in processes, llama and t5 alone are served")
    for values, says in (([[0.5] * 7] * 3, "input_features"), ([["a"]], "Expected `float`, got `str`")):
        path, body = "/v2/models/whisper/generate", json.dumps({"input_features": values})
        status, answer, _ = post(server.http, path, body)
        assert (status, says in answer["error"]) == (400, True), answer


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "whisper"])
def test_openai_streams_the_text_of_transformers(server: Server, family: str) -> None:
    if family not in [model["name"] for model in server.facts["models"]]:
        pytest.skip("in processes, llama and t5 alone are served")
    model = make_model(family)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.http}/v1", api_key="none", max_retries=0) as client:
        for text, is_chat in (("Once upon a time", False), ("<user>Hi 😀<assistant>", True)):
            tokens = torch.tensor([tokenizer().encode(text).ids])
            prompts = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            new_tokens = generated_by_transformers(family, model, prompts, 0, max_new_tokens=COUNT, do_sample=False)
            expected = tokenizer().decode(new_tokens[0].tolist())
            request: Any = {"model": family, "max_tokens": COUNT, "temperature": 0, "stream": True}
            if is_chat:
                messages: Any = [{"role": "user", "content": "Hi 😀"}]
                chunks = client.chat.completions.create(**request, messages=messages)
                assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
            else:
                parts = client.completions.create(**request, prompt=text)
                assert "".join(part.choices[0].text for part in parts) == expected


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "whisper"])
def test_openai_draws_the_tokens_of_transformers(server: Server, family: str) -> None:
    """The text at place i is that of transformers for the seed + i."""
    if family not in [model["name"] for model in server.facts["models"]]:
        pytest.skip("in processes, llama and t5 alone are served")
    prompts = {"input_ids": torch.tensor([[9, 30, 77, 31]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}
    options = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.2}
    expected = [
        generated_by_transformers(
            family, make_model(family), prompts, seed, max_new_tokens=COUNT, do_sample=True, top_k=0, **options
        )
        for seed in (SEED, SEED + 1)
    ]
    body = {"model": family, "prompt": [9, 30, 77, 31], "max_tokens": COUNT, "seed": SEED, "n": 2, **options}
    status, answer, _ = post(server.http, "/v1/completions", json.dumps(body))
    assert status == 200, answer
    assert [choice["text"] for choice in answer["choices"]] == [tokenizer().decode(row[0].tolist()) for row in expected]
    if family in SEQ2SEQ:
        status, answer, _ = post(server.http, "/v1/completions", json.dumps(body | {"prompt": [-1]}))
        assert (status, "expected tokens from 0 on, found -1" in answer["error"]["message"]) == (400, True), answer


def test_a_stop_string_ends_a_text_where_it_does_in_transformers(server: Server) -> None:
    prompts = {"input_ids": torch.tensor([[9, 30, 77, 31]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}
    model, options = make_model("llama"), {"max_new_tokens": COUNT, "do_sample": False}
    text = tokenizer().decode(generated_by_transformers("llama", model, prompts, 0, **options)[0].tolist())
    fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer())
    stops = {text[start : start + length] for length in (1, 2) for start in range(len(text))}
    stops = {stop for stop in stops if stop.isprintable() and stop.isascii()}
    assert len(stops) > 3
    for stop in stops:
        expected = generated_by_transformers(
            "llama", model, prompts, 0, stop_strings=[stop], tokenizer=fast_tokenizer, **options
        )[0].tolist()
        body = {"model": "llama", "prompt": [9, 30, 77, 31], "max_tokens": COUNT, "temperature": 0, "stop": stop}
        _, answer, _ = post(server.http, "/v1/completions", json.dumps(body))
        assert answer["usage"]["completion_tokens"] == len(expected)
        assert answer["choices"][0]["text"] == tokenizer().decode(expected).partition(stop)[0]


def test_grpc_streams_a_text(server: Server) -> None:
    with contextlib.closing(grpc_client(server.grpc)) as client:
        responses = stream_responses(client, [text_input("Hello")], model="t5", parameters={"max_tokens": 9})
    tokens = torch.tensor([tokenizer().encode("Hello").ids])
    expected = generated_by_transformers(
        "t5", make_model("t5"), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, 0, max_new_tokens=9
    )
    found = [int.from_bytes(response.raw_output_contents[1], "little") for response in responses]
    assert numpy.array_equal(found, expected[0].numpy())
