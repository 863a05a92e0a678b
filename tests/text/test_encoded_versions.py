"""Embeddings of one call are those of one version of the weights, and each of the adapter of its text."""

import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import stagepack
from stagepack.errors import InputError, UpdateError
from tests.adapters.lora import adapted, write_lora
from tests.sentence_models import HIDDEN, TEXTS, sentence_model, sentence_transformers

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


@pytest.mark.parametrize("name", ["tokenizer.json", "config_sentence_transformers.json"])
def test_an_update_that_reads_texts_otherwise_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"prompts": {}}' if name.startswith("config") else '{"version": "2.0"}')
    stagepack.add_assets(
        stagepack.apply_deltas(folder / "old", [folder / "step"], out=tmp_path / "new").path,
        [tmp_path / name],
        overwrite=True,
    )
    pipeline = stagepack.load(folder / "old")
    before = pipeline.encode(TEXTS)
    with pytest.raises(UpdateError, match=f"whose weights alone are others: {name} is another one"):
        pipeline.update(tmp_path / "new")
    assert torch.equal(pipeline.encode(TEXTS), before)
