"""Weights are updated while texts are generated: each text is that of one version, which its answer names."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack_loaders.local_pipeline import Pipeline
from tests.serve.local_server import LocalServer, local_server, serving
from tests.serve.servers import AnyServer, post
from tests.text.generating_families import POSITIONS, make_model

TOKENS, NEW = [5, 7, 11], 20
MODEL = "qwen"


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of a decoder."""
    folder, paths = tmp_path_factory.mktemp("decoders"), []
    for number in range(2):
        model = make_model("qwen3")
        model.generation_config.eos_token_id = None
        torch.manual_seed(number)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.05 * torch.randn_like(weight))
        path = folder / f"{MODEL}-{number}.stagepack"
        stagepack.export(model, out=path, stages=2, generate=POSITIONS, generate_batch=4)
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def expected(versions: list[Path]) -> dict[str, dict[int, list[int]]]:
    """The new tokens of each version after prompts that begin with another token, by the digest of its bundle."""
    texts: dict[str, dict[int, list[int]]] = {}
    for path in versions:
        pipeline = stagepack.load(path)
        texts[pipeline.bundle.digest] = {first: new_tokens(pipeline, first) for first in range(2, 14)}
    return texts


def new_tokens(pipeline: Pipeline, first: int) -> list[int]:
    generated = pipeline.generate(torch.tensor([[first, *TOKENS]]), max_new_tokens=NEW)
    tokens: list[int] = generated[0, 1 + len(TOKENS) :].tolist()
    return tokens


def test_a_generation_finishes_on_its_version(versions: list[Path], expected: dict[str, dict[int, list[int]]]) -> None:
    pipeline, firsts = stagepack.load(versions[0]), range(2, 12)
    digests = [stagepack.open(path).digest for path in versions]
    prompts = torch.tensor([[first, *TOKENS] for first in firsts])  # more than the rows of the cache: three groups
    steps: list[int] = []

    def update(_: Any) -> None:
        steps.append(len(steps))
        if len(steps) == 3:
            pipeline.update(versions[1])

    generated = pipeline.generate(prompts, max_new_tokens=NEW, on_tokens=update)
    assert pipeline.version == digests[1]
    assert generated[:, 4:].tolist() == [expected[digests[0]][first] for first in firsts]
    assert new_tokens(pipeline, 2) == expected[digests[1]][2]


@pytest.fixture
def server(versions: list[Path], tmp_path: Path) -> Iterator[LocalServer]:
    for number, path in enumerate(versions):
        shutil.copytree(path, tmp_path / str(number))
    options = ("--update-folder", str(tmp_path), "--model-control", "explicit")
    with local_server([f"{MODEL}={versions[0]}"], *options) as server:
        yield server


def update(server: AnyServer, source: str) -> None:
    body = json.dumps({"parameters": {"source": source}})
    status, answer, _ = post(server.http, f"/v2/repository/models/{MODEL}/update", body)
    assert status == 200, answer


def ask(server: AnyServer, first: int) -> tuple[str, list[int]]:
    body = {"input_ids": [first, *TOKENS], "parameters": {"max_tokens": NEW, "do_sample": False}}
    status, answer, headers = post(server.http, f"/v2/models/{MODEL}/generate", json.dumps(body))
    assert status == 200, answer
    assert headers["x-model-version"] == answer["weight_version"]
    return answer["weight_version"], answer["output_ids"]


def check_texts_under_updates(server: AnyServer, expected: dict[str, dict[int, list[int]]], count: int) -> set[str]:
    """Ask for texts from many threads while weights are updated; return the versions that answered."""
    has_ended, faults, names = threading.Event(), list[Any](), set[str]()

    def call(first: int) -> None:
        while not has_ended.is_set():
            version, tokens = ask(server, first)
            names.add(version)
            if tokens != expected[version][first]:
                faults.append((first, version, tokens))

    with ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(call, first) for first in range(2, 14)]
        try:
            for number in range(1, count + 1):
                time.sleep(0.05)
                update(server, str(number % 2))
        finally:
            has_ended.set()
        for done in calls:
            done.result()
    assert faults == []
    return names


def test_texts_finish_on_the_version_that_they_began_with(
    server: LocalServer, expected: dict[str, dict[int, list[int]]]
) -> None:
    assert check_texts_under_updates(server, expected, 8) == expected.keys()
    model = server.control.models.find(MODEL, "")
    assert model.sequence_count <= 1  # of a batch that has just ended


@pytest.mark.process
@pytest.mark.slow
def test_texts_over_processes_finish_on_their_version(
    versions: list[Path], expected: dict[str, dict[int, list[int]]], tmp_path: Path
) -> None:
    for number, path in enumerate(versions):
        shutil.copytree(path, tmp_path / str(number))
    options = ("--update-folder", str(tmp_path), "--model-control", "explicit", "--processes", "2")
    with serving([f"{MODEL}={versions[0]}"], *options) as server:
        assert check_texts_under_updates(server, expected, 8) == expected.keys()


def test_answers_of_openai_name_their_version(server: LocalServer, versions: list[Path]) -> None:
    update(server, "1")
    digest = stagepack.open(versions[1]).digest
    body: dict[str, Any] = {"model": MODEL, "prompt": [2, *TOKENS], "max_tokens": 3}
    status, answer, headers = post(server.http, "/v1/completions", json.dumps(body))
    assert (status, answer["weight_version"], headers["x-model-version"]) == (200, digest, digest)
    with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
        assert stream.headers["x-model-version"] == digest
    assert {json.loads(line)["weight_version"] for line in lines} == {digest}


def test_each_text_of_an_answer_names_its_version(
    server: LocalServer, expected: dict[str, dict[int, list[int]]]
) -> None:
    prompts = [[first, *TOKENS] for first in range(2, 14)]  # more than the rows of the cache
    body = {"model": MODEL, "prompt": prompts, "max_tokens": NEW, "temperature": 0, "logprobs": 0}
    has_ended, end_time, is_mixed = threading.Event(), time.monotonic() + 60, False

    def change() -> None:
        number = 0
        while not has_ended.is_set():
            number += 1
            update(server, str(number % 2))

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        try:
            while not is_mixed:
                assert time.monotonic() < end_time
                status, answer, _ = post(server.http, "/v1/completions", json.dumps(body))
                assert status == 200, answer
                for first, choice in enumerate(answer["choices"], 2):
                    tokens = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
                    assert tokens == expected[choice.get("weight_version", answer["weight_version"])][first]
                is_mixed = len({choice.get("weight_version") for choice in answer["choices"]}) > 1
        finally:
            has_ended.set()
        changing.result()
