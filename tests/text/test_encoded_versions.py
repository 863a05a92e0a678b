"""Embeddings of one call are those of one version of the weights, and each of the adapter of its text."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import stagepack
from stagepack.errors import InputError
from tests.adapters.lora import adapted, write_lora
from tests.sentence_models import HIDDEN, TEXTS, sentence_model, sentence_transformers
from tests.serve.local_server import local_server
from tests.serve.servers import post

LAYER = "0.model.encoder.layer.1.output.dense"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    modules = sentence_transformers().sentence_transformer.modules
    return sentence_model(tmp_path_factory.mktemp("model"), modules.Pooling(HIDDEN, include_prompt=False))


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of a model, and two adapters of the first one."""
    folder = tmp_path_factory.mktemp("versions")
    bundle = stagepack.export(model, out=folder / "old", stages=2)
    for seed, name in enumerate(("first", "second")):
        lora = write_lora(model, folder / f"lora-{name}", {LAYER: 4}, seed, lora_alpha=64)
        stagepack.write_adapter(bundle, lora, out=folder / name)
    state = {name: tensor + torch.ones_like(tensor) / 8 for name, tensor in stagepack.load(bundle).state_dict().items()}
    stagepack.delta(bundle, state, out=folder / "step")
    return folder


def test_each_text_has_its_own_adapter(folder: Path, model: Any) -> None:
    pipeline = stagepack.load(folder / "old", adapters=[folder / "first", folder / "second"])
    names = [("first", None, "second")[number % 3] for number in range(len(TEXTS))]
    expected = []
    for text, name in zip(TEXTS, names, strict=True):
        if name is None:
            expected.append(model.encode(text))
            continue
        with adapted(model, folder / f"lora-{name}"):
            expected.append(model.encode(text))
    for batch_size in (2, 3, 32):
        found = pipeline.encode(TEXTS, batch_size=batch_size, adapter=names)
        torch.testing.assert_close(found, torch.tensor(numpy.array(expected)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pipeline.encode(TEXTS[0], adapter=["first"]), torch.tensor(expected[0]))
    for wrong in (["first"], [*names, "first"]):
        with pytest.raises(InputError, match=f"adapter: .* each of {len(TEXTS)}, found {len(wrong)} in a list"):
            pipeline.encode(TEXTS, adapter=wrong)


def test_all_batches_of_a_call_are_of_one_version(folder: Path) -> None:
    pipeline = stagepack.load(folder / "old")
    sentences = TEXTS * 6
    versions = [pipeline.encode(sentences, batch_size=1)]
    pipeline.update(folder / "step")
    versions.append(pipeline.encode(sentences, batch_size=1))
    assert not torch.allclose(*versions)
    has_ended = threading.Event()

    def change() -> None:
        while not has_ended.is_set():
            pipeline.update(folder / "old")
            pipeline.update(folder / "step")

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(10):
            found = pipeline.encode(sentences, batch_size=1)
            assert any(torch.equal(found, expected) for expected in versions)
    finally:
        has_ended.set()
        changing.join()


def test_an_answer_with_embeddings_is_of_the_version_that_it_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentences, old = TEXTS * 40, stagepack.load(folder / "old")
    with local_server([f"texts={folder / 'old'}"]) as server:
        model = server.control.models.find("texts", "")
        submit, submitted = model._scheduler.submit, list[Any]()

        def submit_and_update(call: Any) -> None:
            submitted.append(call)
            if len(submitted) == 1:
                model.pipeline.update(folder / "step")
            elif len(submitted) == 2:  # none has run when the second one chooses its version
                submit(submitted[0])
            if len(submitted) > 1:
                submit(call)

        monkeypatch.setattr(model._scheduler, "submit", submit_and_update)
        body = json.dumps({"model": "texts", "input": sentences})
        for source in (folder / "step", folder / "old"):
            status, answer, headers = post(server.http, "/v1/embeddings", body)
            found = numpy.array([entry["embedding"] for entry in answer["data"]])
            names = headers["x-model-version"], answer["weight_version"]
            assert (status, *names) == (200, old.version, old.version)
            numpy.testing.assert_allclose(found, old.encode(sentences), rtol=1e-3, atol=1e-4)
            old.update(source)
    assert len(submitted) > 4
