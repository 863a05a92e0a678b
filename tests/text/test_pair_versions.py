"""Weights of an encoder and its decoder are updated while texts are generated: each text is that of one version of both."""

import functools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
import stagepack_text.generate
from stagepack_loaders.entry_points import EntryPointPipelines
from tests.serve.local_server import LocalServer, local_server, serving
from tests.serve.servers import AnyServer, post
from tests.text.generating_families import POSITIONS, make_model
from tests.waiting import wait_until

NEW, FIRSTS = 12, range(2, 8)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of an encoder and a decoder, and a delta from the first one."""
    folder, paths = tmp_path_factory.mktemp("pairs"), []
    for number in range(2):
        model = make_model("t5")
        model.generation_config.eos_token_id = None
        torch.manual_seed(number)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.3 * torch.randn_like(weight))
        paths.append(folder / str(number))
        stagepack.export(model, out=paths[-1], generate=POSITIONS, generate_batch=4)
    stagepack.delta(paths[0], paths[1], out=folder / "step")
    return [*paths, folder / "step"]


@pytest.fixture(scope="module")
def expected(steps: list[Path]) -> dict[str, dict[int, list[int]]]:
    """The tokens of each version by the first one of the prompt, by the digest of its bundle."""
    found = {}
    for path in steps[:2]:
        pipelines = stagepack.load_entry_points(path)
        found[pipelines.version] = {first: tokens(pipelines, first) for first in FIRSTS}
    assert len({str(texts) for texts in found.values()}) == 2
    return found


def tokens(pipelines: EntryPointPipelines, first: int) -> list[int]:
    prompt = torch.tensor([[first, 5, 7, 11]])
    found: list[int] = pipelines.generate(prompt, max_new_tokens=NEW)[0, 1:].tolist()
    return found


def test_a_decoder_continues_what_the_encoder_of_its_version_has_read(
    steps: list[Path], expected: dict[str, dict[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipelines, encode = stagepack.load_entry_points(steps[0]), stagepack_text.generate._encode
    old, new = expected

    def encode_and_update(*arguments: Any) -> Any:
        monkeypatch.setattr(stagepack_text.generate, "_encode", encode)
        rows = encode(*arguments)
        pipelines.update(steps[2])
        return rows

    monkeypatch.setattr(stagepack_text.generate, "_encode", encode_and_update)
    assert tokens(pipelines, 2) == expected[old][2]
    assert pipelines.version == new
    assert tokens(pipelines, 2) == expected[new][2]


def check_texts_under_updates(server: AnyServer, expected: dict[str, dict[int, list[int]]], count: int) -> None:
    has_ended, faults, names = threading.Event(), list[Any](), set[str]()

    def call(first: int) -> None:
        body = {"input_ids": [first, 5, 7, 11], "parameters": {"max_tokens": NEW, "do_sample": False}}
        while not has_ended.is_set():
            status, answer, headers = post(server.http, "/v2/models/pair/generate", json.dumps(body))
            assert status == 200, answer
            version = answer["weight_version"]
            names.add(version)
            if answer["output_ids"] != expected[version][first] or headers["x-model-version"] != version:
                faults.append((first, version, answer))

    with ThreadPoolExecutor(len(FIRSTS)) as pool:
        calls = [pool.submit(call, first) for first in FIRSTS]
        try:
            for number in range(1, count + 1):
                if number <= len(expected):
                    wait_until(functools.partial(answered_by, names, number))
                source = json.dumps({"parameters": {"source": ("0", "step")[number % 2]}})
                name = ("pair", "pair_encode")[number % 3 == 0]
                status, answer, _ = post(server.http, f"/v2/repository/models/{name}/update", source)
                assert status == 200, answer
        finally:
            has_ended.set()
        for done in calls:
            done.result()
    assert faults == []
    assert names == expected.keys()


def answered_by(names: set[str], count: int) -> bool:
    """Whether so many versions have answered."""
    return len(names) >= count


@pytest.fixture
def server(steps: list[Path]) -> Iterator[LocalServer]:
    options = ("--update-folder", str(steps[0].parent), "--model-control", "explicit")
    with local_server([f"pair={steps[0]}"], *options) as server:
        yield server


def test_served_texts_are_those_of_one_version(server: LocalServer, expected: dict[str, dict[int, list[int]]]) -> None:
    check_texts_under_updates(server, expected, 8)
    models = [server.control.models.find(name, "") for name in ("pair", "pair_encode")]
    assert len({model.bundle.digest for model in models}) == 1


@pytest.mark.process
@pytest.mark.slow
def test_served_texts_over_processes_are_those_of_one_version(
    steps: list[Path], expected: dict[str, dict[int, list[int]]]
) -> None:
    options = ("--update-folder", str(steps[0].parent), "--model-control", "explicit", "--processes", "1")
    with serving([f"pair={steps[0]}"], *options) as server:
        check_texts_under_updates(server, expected, 6)
