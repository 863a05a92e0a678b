"""A bundle with adapters answers in ONNX Runtime as in torch, by one session over one copy of the weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import InputError
from stagepack.format.reader import Bundle
from stagepack.roads.onnx import add_onnx
from tests.adapters.lora import adapted, write_lora
from tests.adapters.models import IDS, MASK, export_model, logits, make_model
from tests.adapters.test_answers import CASES, LLAMA, Named, Repeated

Exported = Callable[..., Bundle]


@pytest.mark.parametrize("stages", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_a_call_with_an_adapter_answers_as_in_torch(case: str, stages: int, exported: Exported, tmp_path: Path) -> None:
    name, ranks, settings = CASES[case]
    model, bundle = make_model(name), exported(name, stages, onnx=True)
    adapters, expected = dict[str, Path](), dict[str | None, torch.Tensor]({None: logits(model)})
    for seed, adapter in enumerate(("x", "y")):
        own = {module: rank + 2 * seed for module, rank in ranks.items()}
        lora = write_lora(model, tmp_path / f"lora-{adapter}", own, seed, **settings)
        adapters[adapter] = stagepack.write_adapter(bundle, lora, out=tmp_path / adapter).path
        with adapted(model, lora):
            expected[adapter] = logits(model)
    pipeline = stagepack.load(bundle, adapters=adapters, runtime="onnxruntime")
    plain = logits(stagepack.load(bundle, runtime="onnxruntime"))
    assert torch.equal(logits(pipeline), plain)
    for adapter in adapters:
        torch.testing.assert_close(logits(pipeline, adapter=adapter), expected[adapter], rtol=1e-4, atol=1e-5)
    mixed = logits(pipeline, adapter=["y", None, "x"])
    rows = torch.stack([expected["y"][0], expected[None][1], expected["x"][2]])
    torch.testing.assert_close(mixed, rows, rtol=1e-4, atol=1e-5)
    assert torch.equal(mixed[1], plain[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("copied", [False, True])
def test_other_dtypes_and_copied_weights_answer_as_in_torch(
    dtype: torch.dtype, copied: bool, exported: Exported, tmp_path: Path
) -> None:
    model, bundle = make_model("llama", dtype), exported("llama", 2, dtype, onnx=True)
    lora = write_lora(model, tmp_path / "lora", LLAMA | {"model.embed_tokens": 2})
    adapters = {"x": stagepack.write_adapter(bundle, lora, out=tmp_path / "a").path}
    pipeline = stagepack.load(bundle, adapters=adapters, runtime="onnxruntime", copy=copied)
    with adapted(model, lora):
        expected = logits(model)
    tolerance = 2e-2 if dtype == torch.float16 else 1e-6  # the rotary embedding is float32
    plain = logits(stagepack.load(bundle, runtime="onnxruntime", copy=copied))
    torch.testing.assert_close(plain, logits(model), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(logits(pipeline, adapter="x"), expected, rtol=tolerance, atol=tolerance)
    # ONNX Runtime computes float16 in float32, and rounds fewer values between nodes.
    difference = 1e-3 if dtype == torch.float16 else 0
    torch.testing.assert_close(logits(pipeline), plain, rtol=20 * difference, atol=difference)


def test_stages_of_two_runtimes_run_the_adapters_of_a_call(tmp_path: Path) -> None:
    model = make_model("llama")
    bundle = add_onnx(export_model(model, tmp_path, stages=3)).bundle
    lora = write_lora(model, tmp_path / "lora", LLAMA, use_rslora=True)
    adapters = {"x": stagepack.write_adapter(bundle, lora, out=tmp_path / "a").path}
    with adapted(model, lora):
        expected = logits(model)
    runtime = ["torch", "onnxruntime", "torch"]
    pipeline = stagepack.load(bundle, adapters=adapters, runtime=runtime)
    torch.testing.assert_close(logits(pipeline, adapter="x"), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(pipeline, adapter=[None, "x", None])[1], expected[1], rtol=1e-4, atol=1e-5)
    values: dict[str, Any] = {"input_ids": IDS.numpy(), "attention_mask": MASK.numpy()}
    for number, entry in enumerate(bundle.stages):
        stage = stagepack.load_stage(bundle, number, adapters=adapters, runtime="onnxruntime")
        outputs = stage(**{name: values[name] for name in entry.inputs}, adapter="x")
        values |= dict(zip(entry.outputs, outputs, strict=True))
    torch.testing.assert_close(torch.from_numpy(outputs[0]), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="expected one of x, or None for none, found 'y'"):
        stage(**{name: values[name] for name in entry.inputs}, adapter="y")


def test_a_layer_that_is_called_again_is_changed_each_time(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Repeated().eval(), torch.randn(3, 4)
    dynamic_shapes = {"x": {0: torch.export.Dim("rows", min=1, max=8)}}
    bundle = stagepack.export(model, (x,), out=tmp_path / "m.stagepack", dynamic_shapes=dynamic_shapes)
    bundle = add_onnx(bundle).bundle
    lora = write_lora(model, tmp_path / "lora", {"first": 2, "shared": 3})
    stagepack.write_adapter(bundle, lora, out=tmp_path / "a")
    pipeline = stagepack.load(bundle, adapters=[tmp_path / "a"], runtime="onnxruntime")
    with torch.no_grad(), adapted(model, lora):
        expected = model(x)
    torch.testing.assert_close(pipeline(x, adapter="a"), expected)
    torch.testing.assert_close(pipeline(x, adapter=[None, "a", "a"])[1:], expected[1:])
    torch.testing.assert_close(pipeline(x[:1], adapter="a"), expected[:1])


def test_a_model_without_a_batch_has_one_adapter_in_a_call(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, own = Named(), torch.randn(2, 4), torch.randn(2, 3)
    bundle = add_onnx(stagepack.export(model, (x, own), out=tmp_path / "m.stagepack", dynamic_shapes={})).bundle
    lora = write_lora(model, tmp_path / "lora", {"linear": 2})
    stagepack.write_adapter(bundle, lora, out=tmp_path / "a")
    pipeline = stagepack.load(bundle, adapters=[tmp_path / "a"], runtime="onnxruntime")
    with torch.no_grad(), adapted(model, lora):
        torch.testing.assert_close(pipeline(x, adapter=own, adapter_="a"), model(x, own))


def test_what_rows_cannot_have_apart_is_refused(exported: Exported, tmp_path: Path) -> None:
    model, bundle = make_model("gpt2"), exported("gpt2", 1, onnx=True)
    lora = write_lora(model, tmp_path / "lora", {"transformer.wpe": 4})
    stagepack.write_adapter(bundle, lora, out=tmp_path / "a")
    pipeline = stagepack.load(bundle, adapters=[tmp_path / "a"], runtime="onnxruntime")
    with adapted(model, lora):
        torch.testing.assert_close(logits(pipeline, adapter="a"), logits(model), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"transformer\.wpe computes the same for all rows"):
        logits(pipeline, adapter=["a", None, None])


@pytest.mark.parametrize("copied", [False, True])
def test_whole_weights_are_replaced(copied: bool, exported: Exported, tmp_path: Path) -> None:
    model, bundle = make_model("bert"), exported("bert", 1, onnx=True)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    query = "bert.encoder.layer.0.attention.self.query"
    adapters, expected = dict[str, Path](), dict[str | None, torch.Tensor]({None: logits(model)})
    for seed, name in enumerate(("x", "y", "z")):
        replaced = {"classifier.weight": state["classifier.weight"] + seed + 1}
        replaced |= {f"{query}.base_layer.bias": state[f"{query}.bias"] + seed} if name == "y" else {}
        lora = write_lora(
            model, tmp_path / f"lora-{name}", {query: 4}, seed, replaced if name != "z" else {}, bias="all"
        )
        adapters[name] = stagepack.write_adapter(bundle, lora, out=tmp_path / name).path
        with torch.no_grad():
            model.get_parameter(f"{query}.bias").add_(1 if name == "y" else 0)
        with adapted(model, lora):
            expected[name] = logits(model)
        model.load_state_dict(state)
    pipeline = stagepack.load(bundle, adapters=adapters, runtime="onnxruntime", copy=copied)
    for adapter, answer in expected.items():
        torch.testing.assert_close(logits(pipeline, adapter=adapter), answer, rtol=1e-4, atol=1e-5)
    mixed = logits(pipeline, adapter=["z", None, None])
    torch.testing.assert_close(mixed[0], expected["z"][0], rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="rows of one call cannot have several adapters: x replaces whole weights"):
        logits(pipeline, adapter=["x", "z", None])
