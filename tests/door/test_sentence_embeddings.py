"""Pipelines of sentence-transformers: a bundle gives what ``encode`` gives."""

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import stagepack
from stagepack.errors import CaptureError, ExportWarning, InputError, MissingPackageError
from tests.hostile.attack import run
from tests.modules import module_of
from tests.sentence_models import HIDDEN, TEXTS, sentence_model, sentence_transformers, tokenizer
from tests.zoo.architectures.encoders import minilm_folder

PROMPT = "query : "
Saved = tuple[Path, Any, stagepack.Bundle]


def modules() -> Any:
    return sentence_transformers().sentence_transformer.modules


def check_equal(bundle: stagepack.Bundle, model: Any) -> None:
    """Texts in several batches, one text, and texts with a prompt give the bits of the model."""
    pipeline = stagepack.load(bundle)
    assert torch.equal(pipeline.encode(TEXTS), model.encode(TEXTS, convert_to_tensor=True))
    assert torch.equal(pipeline.encode(TEXTS[1]), model.encode(TEXTS[1], convert_to_tensor=True))
    options: dict[str, Any] = {"batch_size": 2, "prompt": PROMPT}
    assert torch.equal(pipeline.encode(TEXTS, **options), model.encode(TEXTS, **options, convert_to_tensor=True))


@pytest.mark.parametrize("side", ["right", "left"])
def test_all_poolings_together_equal_encode_on_both_sides_of_padding(side: str, tmp_path: Path) -> None:
    model = sentence_model(tmp_path / "encoder", modules().Pooling(HIDDEN, modules().Pooling.POOLING_MODES), side=side)
    bundle = stagepack.export(model, out=tmp_path / "m.stagepack", stages=2)
    check_equal(bundle, model)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["right", "left"])
def test_onnx_models_agree_within_rounding(side: str, tmp_path: Path) -> None:
    # The largest of no tokens is -1e9 in torch and infinite in ONNX Runtime, so that such a stage stays in torch.
    modes = [mode for mode in modules().Pooling.POOLING_MODES if mode != "max"]
    pooling = modules().Pooling(HIDDEN, modes, include_prompt=False)
    model = sentence_model(tmp_path / "encoder", pooling, modules().Normalize(), side=side)
    bundle = stagepack.export(model, out=tmp_path / "m.stagepack")
    stagepack.add_onnx(bundle)
    pipeline = stagepack.load(bundle.path, runtime="onnxruntime")
    for prompt in ("", PROMPT):
        assert numpy.allclose(pipeline.encode(TEXTS, prompt=prompt), model.encode(TEXTS, prompt=prompt), atol=1e-5)


@pytest.mark.parametrize("side", [pytest.param("right", marks=pytest.mark.slow), "left"])
def test_prompts_are_left_out_of_poolings_that_say_so(side: str, tmp_path: Path) -> None:
    pooling = modules().Pooling(HIDDEN, modules().Pooling.POOLING_MODES, include_prompt=False)
    model = sentence_model(tmp_path / "encoder", pooling, side=side)
    bundle = stagepack.export(model, out=tmp_path / "m.stagepack")
    assert "prompt_length" in {edge.name for edge in bundle.inputs}
    check_equal(bundle, model)
    assert not torch.equal(
        model.encode(TEXTS[0], convert_to_tensor=True), model.encode(TEXTS[0], prompt=PROMPT, convert_to_tensor=True)
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A folder with a dense layer, a norm of layers, lower case and prompts; its model, and its bundle. Change none of them."""
    folder = tmp_path_factory.mktemp("saved")
    model = sentence_model(
        folder / "encoder",
        modules().Pooling(HIDDEN, ("mean", "cls")),
        modules().LayerNorm(2 * HIDDEN),
        modules().Dense(2 * HIDDEN, 16, activation_function=torch.nn.Tanh()),
        modules().Normalize(),
        types=True,
        do_lower_case=True,
    )
    model.prompts = {"query": PROMPT, "passage": ""}
    model.default_prompt_name = "query"
    model.max_seq_length = 12
    model.save(str(folder / "pipeline"))
    out = folder / "m.stagepack"
    done = run("export", str(folder / "pipeline"), "-o", str(out), "--stages", "2")
    assert done.exit_code == 0, done.output
    assert "(torch.export.export of Transformer, Pooling, LayerNorm, Dense, Normalize)" in done.output
    return folder / "pipeline", model, stagepack.open(out)


def test_a_folder_is_exported_with_all_its_modules_and_its_tokenizer(saved: Saved) -> None:
    _, model, bundle = saved
    assert [edge.name for edge in bundle.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    check_equal(bundle, model)
    pipeline = stagepack.load(bundle)
    expected = model.encode(TEXTS, prompt_name="passage", convert_to_tensor=True)
    assert torch.equal(pipeline.encode(TEXTS, prompt_name="passage"), expected)
    says = r"expected a prompt of the model \('document', 'passage', 'query'\), found 'title'"
    with pytest.raises(InputError, match=says):
        pipeline.encode(TEXTS, prompt_name="title")
    # The names are those of the model, and what a tokenizer of transformers returns is taken as it is.
    assert pipeline.state_dict().keys() == model.state_dict().keys()
    encoded = model.tokenizer([TEXTS[0].lower()], return_tensors="pt")
    with torch.inference_mode():
        answer = pipeline(**encoded)["sentence_embedding"][0]
    assert torch.equal(answer, pipeline.encode(TEXTS[0], prompt=""))


def test_fine_tuned_pipelines_take_the_graphs_of_a_bundle(saved: Saved, tmp_path: Path) -> None:
    _, model, bundle = saved
    model = copy.deepcopy(model)
    torch.nn.init.normal_(model[3].linear.bias)
    model.prompts["query"] = "a "
    model.save(str(tmp_path / "tuned"))
    check_equal(stagepack.export(tmp_path / "tuned", graph_from=bundle, out=tmp_path / "tuned.stagepack"), model)
    [pooling] = (tmp_path / "tuned").glob("*_Pooling/config.json")
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"pooling_mode": "cls"}))
    says = r'computes otherwise than the graphs .*: modules\.1\.pooling_mode is "cls" in its'
    with pytest.raises(CaptureError, match=says):
        stagepack.export(tmp_path / "tuned", graph_from=bundle, out=tmp_path / "cls.stagepack")


def test_an_object_is_exported_as_it_is_and_stays_so(tmp_path: Path) -> None:
    def move(self: Any, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return features | {"sentence_embedding": features["sentence_embedding"] + self.shift}

    shift = module_of(move, shift=torch.nn.Parameter(torch.ones(HIDDEN)))
    model = sentence_model(tmp_path / "encoder", modules().Pooling(HIDDEN), modules().Dropout(0.5), shift)
    model.truncate_dim = 8
    model.train()
    bundle = stagepack.export(model, out=tmp_path / "m.stagepack")
    assert all(module.training for module in model.modules())
    check_equal(bundle, model)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(other, marks=pytest.mark.slow) for other in (torch.float16, torch.float32))],
    ids=str,
)
def test_embeddings_have_the_dtype_of_the_model_also_those_of_no_texts(dtype: torch.dtype, tmp_path: Path) -> None:
    model = sentence_model(tmp_path / "encoder", modules().Pooling(HIDDEN), modules().Dense(HIDDEN, 16))
    model.save(str(tmp_path / "pipeline"))
    bundle = stagepack.export(tmp_path / "pipeline", dtype=dtype, out=tmp_path / "m.stagepack")
    check_equal(bundle, model.to(dtype))
    embeddings = stagepack.load(bundle).encode([])
    assert (embeddings.shape, embeddings.dtype) == ((0, 16), dtype)


def test_static_embeddings_take_texts_too(tmp_path: Path) -> None:
    static = modules().StaticEmbedding(tokenizer().backend_tokenizer, embedding_dim=16)
    model = sentence_transformers().SentenceTransformer(modules=[static], device="cpu")
    model.save(str(tmp_path / "pipeline"))
    check_equal(stagepack.export(tmp_path / "pipeline", out=tmp_path / "m.stagepack"), model)


def test_what_cannot_be_carried_is_said(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, _ = saved
    encoder = sentence_transformers().SentenceTransformer(modules=[model[0]], device="cpu")
    with pytest.raises(CaptureError, match="the modules Transformer give no 'sentence_embedding': add a Pooling"):
        stagepack.export(encoder, out=tmp_path / "m.stagepack")
    words = modules().BoW(["how", "do"])
    with pytest.raises(CaptureError, match=r"BoW: expected tokens of texts .* found sentence_embedding \[2, 2\]"):
        stagepack.export(sentence_transformers().SentenceTransformer(modules=[words], device="cpu"), out=tmp_path / "m")
    monkeypatch.setattr(
        type(model[0]),
        "preprocess",
        lambda self, texts, **_: dict(self.tokenizer(texts[::-1], return_tensors="pt", padding=True, truncation=True)),
    )
    with pytest.warns(ExportWarning, match="Transformer: reads texts by code of its own"):
        bundle = stagepack.export(model, out=tmp_path / "m.stagepack")
    with pytest.raises(InputError, match="expected tokens, found a text"):
        stagepack.load(bundle).encode(TEXTS)


def test_other_kinds_of_models_are_named(saved: Saved, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved[0], tmp_path / "pipeline"))
    settings_path = folder / "config_sentence_transformers.json"
    settings = json.loads(settings_path.read_text())
    settings_path.write_text(json.dumps(settings | {"model_type": "SparseEncoder"}))
    says = "expected a SentenceTransformer of sentence-transformers, found a SparseEncoder"
    with pytest.raises(CaptureError, match=says):
        stagepack.export(folder, out=tmp_path / "m.stagepack")
    settings_path.write_text(json.dumps(settings | {"model_type": "CrossEncoder"}))
    with pytest.warns(ExportWarning, match="is a CrossEncoder .* without what predict"):
        stagepack.export(folder, out=tmp_path / "m.stagepack")


def test_a_missing_package_is_named_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules.json").write_text("[]")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    says = r"modules\.json.*the extra 'sentence-transformers' .* the encoder without"
    with pytest.raises(MissingPackageError, match=says):
        stagepack.export(tmp_path, out=tmp_path / "m.stagepack")


def test_a_module_of_ones_own_embeds_texts_with_any_tokenizer(tmp_path: Path) -> None:
    def embed(self: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sentence_embedding": (self.words(input_ids) * attention_mask[..., None]).sum(1)}

    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=64)
    words = tokenizer().backend_tokenizer
    words.enable_padding(length=4)  # which longer texts exceed
    (tmp_path / "tokenizer.json").write_text(words.to_str())
    embedding, ids = torch.nn.Embedding(128, 8), torch.ones(2, 4, dtype=torch.int64)
    model = module_of(embed, words=embedding).eval()
    shapes = {name: {0: batch, 1: length} for name in ("input_ids", "attention_mask")}
    bundle = stagepack.export(
        model,
        kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        dynamic_shapes=shapes,
        assets=[tmp_path / "tokenizer.json"],
        out=tmp_path / "m.stagepack",
    )
    sentences = ["a", "how do i bake bread"]
    rows = [words.encode(sentence) for sentence in sentences]
    expected = [embedding(torch.tensor(row.ids[: sum(row.attention_mask)])).sum(0) for row in rows]
    assert torch.allclose(stagepack.load(bundle).encode(sentences), torch.stack(expected), atol=1e-5)
    with pytest.raises(InputError, match="expected 1 to 64"):
        stagepack.load(bundle).encode("a " * 100)
    with pytest.raises(InputError, match="the tokenizer of the bundle fails on the text"):
        stagepack.load(bundle).encode("\ud800")
    for wrong in ([1], 5, torch.tensor(5)):
        with pytest.raises(InputError, match=r"^encode: expected a text, or a list of texts, found (int|Tensor)$"):
            stagepack.load(bundle).encode(wrong)


def test_texts_are_refused_where_nothing_reads_them(exported: tuple[Path, torch.Tensor]) -> None:
    with pytest.raises(InputError, match="to encode texts, expected a model that takes input_ids"):
        stagepack.load(exported[0]).encode("a")


@pytest.mark.slow
def test_published_weights_equal_encode(tmp_path: Path) -> None:
    model = sentence_transformers().SentenceTransformer(minilm_folder(), device="cpu")
    bundle = stagepack.export(minilm_folder(), out=tmp_path / "m.stagepack", stages=3)
    check_equal(bundle, model)
    stagepack.add_onnx(bundle)
    answers = stagepack.load(bundle.path, runtime="onnxruntime").encode(TEXTS)
    assert numpy.allclose(answers, model.encode(TEXTS), atol=1e-5)
