"""Models of transformers that generate: by every road, the tokens are those of its own `generate`."""

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import tritonclient.grpc
from transformers import PreTrainedTokenizerFast

import stagepack
from tests.serve.servers import Server, grpc_client, post, stagepack_server
from tests.text.generating_families import (
    FAMILIES,
    SEQ2SEQ,
    family_bundle,
    generated_by_transformers,
    make_model,
    make_prompts,
)
from tests.text.generating_model import tokenizer
from tests.text.test_generation import events, stream_responses, text_input

pytestmark = pytest.mark.xdist_group("serve")
COUNT = 24
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"do_sample": True, "top_p": 0.9, "top_k": 40, "temperature": 1.2})
SEED = 5
TEXT_FAMILIES = [family for family in FAMILIES if family != "whisper"]
OPERATORS = "transformers"
IMPORTS = "transformers.integrations.moe"
Generate = Callable[..., Any]


@contextmanager
def one_process(path: Path) -> Iterator[Generate]:
    yield stagepack.load_entry_points(path, allow_ops=[OPERATORS]).generate


@contextmanager
def processes(path: Path) -> Iterator[Generate]:
    bundle = stagepack.open(path)
    pipelines = stagepack.load_entry_points(bundle, allow_ops=[OPERATORS])
    name = "decode" if "decode" in pipelines else "forward"
    encoder: dict[str, Any] = {"encoder": pipelines["encode"]} if name == "decode" else {}
    options: dict[str, Any] = {"allow_ops": [OPERATORS], "imports": [IMPORTS]}
    with stagepack.load(bundle.select(name), processes=True, **options) as pipeline:
        yield functools.partial(pipeline.generate, **encoder)


@contextmanager
def onnxruntime(path: Path) -> Iterator[Generate]:
    for entry_point in stagepack.open(path).entry_points:
        assert stagepack.add_onnx(stagepack.open(path).select(entry_point.name)).torch_only == {}
    yield stagepack.load_entry_points(path, runtime="onnxruntime").generate


# The families of each road; ONNX Runtime is asked for a decoder alone, and for one with an encoder.
ROADS: dict[str, tuple[Callable[[Path], AbstractContextManager[Generate]], tuple[str, ...]]] = {
    "one process": (one_process, FAMILIES),
    "processes": (processes, FAMILIES),
    "onnxruntime": (onnxruntime, ("llama", "t5")),
}
QUICK = ("one process",), ("llama", "t5")


@pytest.mark.parametrize(
    ("road", "family"),
    [
        pytest.param(road, family, marks=() if road in QUICK[0] and family in QUICK[1] else pytest.mark.slow)
        for road, (_, families) in ROADS.items()
        for family in families
    ],
)
def test_a_pipeline_generates_the_tokens_of_transformers(
    road: str, family: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(family_bundle(tmp_path_factory, family), tmp_path / "m.stagepack"))
    assert {"config.json", "generation_config.json"} <= stagepack.open(path).files.keys()
    model = make_model(family)
    with ROADS[road][0](path) as generate:
        for batch_size in (1, 4):
            prompts = make_prompts(family, batch_size)
            for settings in SETTINGS:
                expected = generated_by_transformers(family, model, prompts, SEED, max_new_tokens=COUNT, **settings)
                tokens = generate(*prompts.values(), max_new_tokens=COUNT, seed=SEED, **settings)
                assert torch.equal(tokens[:, -expected.shape[1] :], expected), (batch_size, settings)


@pytest.fixture(scope="module", params=["one process", "processes"])
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    families = FAMILIES if request.param == "one process" else ("llama", "t5")
    options = ["--allow-ops", OPERATORS, "--import", IMPORTS]
    options += ["--processes", "2"] if request.param == "processes" else []
    with stagepack_server([family_bundle(tmp_path_factory, family) for family in families], *options) as server:
        yield server


@pytest.fixture(params=FAMILIES)
def family(server: Server, request: pytest.FixtureRequest) -> str:
    if request.param not in [model["name"] for model in server.facts["models"]]:
        pytest.skip("in processes, llama and t5 alone are served")
    return str(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_server_generates_the_tokens_of_transformers(server: Server, family: str, settings: dict[str, Any]) -> None:
    prompts = make_prompts(family, 1)
    name = "input_features" if "input_features" in prompts else "input_ids"
    expected = generated_by_transformers(family, make_model(family), prompts, SEED, max_new_tokens=COUNT, **settings)[
        0
    ].tolist()
    body = {name: prompts[name][0].tolist(), "parameters": {"max_tokens": COUNT, "seed": SEED} | settings}
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


@pytest.mark.slow
def test_grpc_streams_a_text(server: Server) -> None:
    with contextlib.closing(grpc_client(server.grpc)) as client:
        responses = stream_responses(client, [text_input("Hello")], model="t5", parameters={"max_tokens": 9})
    tokens = torch.tensor([tokenizer().encode("Hello").ids])
    prompts = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    expected = generated_by_transformers("t5", make_model("t5"), prompts, 0, max_new_tokens=9)[0].tolist()
    assert [int.from_bytes(response.raw_output_contents[1], "little") for response in responses] == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", ["whisper"], indirect=True)
def test_features_of_another_size_are_refused(server: Server, family: str) -> None:
    for values, says in (([[0.5] * 7] * 3, "input_features"), ([["a"]], "Expected `float`, got `str`")):
        path, body = f"/v2/models/{family}/generate", json.dumps({"input_features": values})
        status, answer, _ = post(server.http, path, body)
        assert (status, says in answer["error"]) == (400, True), answer


@pytest.mark.slow
@pytest.mark.parametrize("family", TEXT_FAMILIES, indirect=True)
def test_openai_streams_the_text_of_transformers(server: Server, family: str) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("family", TEXT_FAMILIES, indirect=True)
def test_openai_draws_the_tokens_of_transformers(server: Server, family: str) -> None:
    """The text at place i is that of transformers for the seed + i."""
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


@pytest.mark.slow
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
