"""A bundle with adapters answers as peft does, with any cut, for one adapter and for several in one batch."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import stagepack
from stagepack.adapter.rewrite import ChangedGraph, change_graph
from stagepack.errors import AdapterError, DigestError, InputError, NotABundleError, OptionError, UpdateError
from stagepack.format.reader import Bundle
from stagepack_loaders.batching import BatchLimit, batch_limit
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.preparation import check_runtimes
from stagepack_loaders.torch import adapter_module
from stagepack_serving.protocol.interface import Interface
from tests.adapters.lora import adapted, write_lora
from tests.adapters.models import IDS, MASK, export_model, logits, make_model
from tests.hostile.attack import run
from tests.runtimes.numpy_runtime.runtime import NumpyRuntime

LLAMA = {"model.layers.0.self_attn.q_proj": 4, "model.layers.1.mlp.up_proj": 2, "lm_head": 3}
# Name of the model, its adapted modules, settings.
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "linear layers": ("llama", LLAMA, {}),
    "the embedding, scaled by the root of the rank": ("llama", {"model.embed_tokens": 4}, {"use_rslora": True}),
    "an alpha for one module": ("llama", LLAMA, {"alpha_pattern": {"lm_head": 1}}),
    "Conv1D": ("gpt2", {"transformer.h.0.attn.c_attn": 4, "transformer.h.1.mlp.c_proj": 4}, {}),
    "one of two tied weights": ("gpt2", {"lm_head": 4}, {}),
    "the other one": ("gpt2", {"transformer.wte": 4}, {}),
    "a classifier": ("bert", {"bert.encoder.layer.1.attention.self.query": 4, "bert.pooler.dense": 1}, {}),
}


@pytest.mark.parametrize(
    "stages", [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param("layers", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("case", CASES)
def test_a_call_with_an_adapter_has_the_bits_of_peft(
    case: str, stages: Any, exported: Callable[..., Bundle], tmp_path: Path
) -> None:
    name, ranks, settings = CASES[case]
    model, bundle = make_model(name), exported(name, stages)
    lora = write_lora(model, tmp_path / "lora", ranks, **settings)
    stagepack.write_adapter(bundle, lora, out=tmp_path / "a")
    pipeline = stagepack.load(bundle, adapters=[tmp_path / "a"])
    with adapted(model, lora):
        expected = logits(model)
    assert torch.equal(logits(pipeline, adapter="a"), expected)
    plain = logits(pipeline)
    assert torch.equal(plain, logits(model))
    assert not torch.equal(plain, expected)
    # Rows of several adapters are multiplied by other kernels, which round otherwise.
    mixed = logits(pipeline, adapter=[None, "a", None])
    torch.testing.assert_close(mixed[1], expected[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(mixed[::2], plain[::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_change_of_another_dtype_is_computed_as_in_peft(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model("llama", dtype)
    bundle = export_model(model, tmp_path, stages=2)
    lora = write_lora(model, tmp_path / "lora", LLAMA | {"model.embed_tokens": 2})
    pipeline = stagepack.load(bundle, adapters={"x": stagepack.write_adapter(bundle, lora, out=tmp_path / "a").path})
    with adapted(model, lora):
        assert torch.equal(logits(pipeline, adapter="x"), logits(model))


def test_adapters_of_several_ranks_and_modules_share_a_batch(tmp_path: Path) -> None:
    model = make_model("llama")
    bundle = export_model(model, tmp_path, stages=2)
    ranks = {
        "first": LLAMA,
        "second": {"model.layers.0.self_attn.q_proj": 7, "model.embed_tokens": 3},
        "third": {"model.embed_tokens": 1, "lm_head": 2},
    }
    expected = {}
    for number, (name, modules) in enumerate(ranks.items()):
        lora = write_lora(model, tmp_path / f"lora-{name}", modules, seed=number)
        stagepack.write_adapter(bundle, lora, out=tmp_path / name)
        with adapted(model, lora):
            expected[name] = logits(model)
    pipeline = stagepack.load(bundle, adapters=[tmp_path / name for name in ranks])
    assert pipeline.adapters == tuple(ranks)
    for order in (["first", "second", "third"], ["third", "third", "second"]):
        rows = torch.stack([expected[name][row] for row, name in enumerate(order)])
        torch.testing.assert_close(logits(pipeline, adapter=order), rows, rtol=1e-5, atol=1e-5)
    for name in ranks:  # the last rows are kept, and must not be those of another call
        assert torch.equal(logits(pipeline, adapter=name), expected[name])
    assert not any("lora" in name for name in pipeline.state_dict())


def test_whole_weights_and_biases_are_replaced(tmp_path: Path) -> None:
    model = make_model("bert")
    bundle = export_model(model, tmp_path, stages=2)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bias = "bert.encoder.layer.0.attention.self.query"
    replaced = {
        "classifier.weight": state["classifier.weight"] + 1,
        f"{bias}.base_layer.bias": state[f"{bias}.bias"] + 1,
        "bert.encoder.layer.1.output.dense.bias": state["bert.encoder.layer.1.output.dense.bias"],  # as it was
    }
    lora = write_lora(model, tmp_path / "lora", {bias: 4}, replaced=replaced, bias="all")
    adapter = stagepack.write_adapter(bundle, lora, out=tmp_path / "a")
    assert sorted(adapter.document.replaced) == [f"{bias}.bias", "classifier.weight"]
    pipeline = stagepack.load(bundle, adapters=[tmp_path / "a"])
    with torch.no_grad():
        model.get_parameter(f"{bias}.bias").add_(1)
    with adapted(model, lora):
        assert torch.equal(logits(pipeline, adapter="a"), logits(model))
    with pytest.raises(InputError, match="rows of one call cannot have several adapters: a replaces whole weights"):
        logits(pipeline, adapter=["a", None, None])


def test_an_adapter_belongs_to_its_bundle(tmp_path: Path) -> None:
    model = make_model("llama")
    bundle = export_model(model, tmp_path, stages=2)
    lora = write_lora(model, tmp_path / "lora", LLAMA)
    stagepack.write_adapter(bundle, lora, out=tmp_path / "a")
    other = stagepack.recut(bundle, out=tmp_path / "other.stagepack", stages=3)
    with pytest.raises(AdapterError, match=r"is an adapter of the bundle .*: make it for this bundle"):
        stagepack.load(other, adapters=[tmp_path / "a"])
    with pytest.raises(
        NotABundleError,
        match=r"not a stagepack adapter: .* found the folder of an adapter of peft: write it for its bundle by stagepack",
    ):
        stagepack.load(bundle, adapters=[lora])
    tensors = tmp_path / "a" / "adapter.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    with pytest.raises(DigestError, match=r"adapter\.safetensors: the content was changed"):
        stagepack.load(bundle, adapters=[tmp_path / "a"])


def test_a_call_names_adapters_that_are_loaded(tmp_path: Path) -> None:
    model = make_model("llama")
    bundle = export_model(model, tmp_path, stages=2)
    stagepack.write_adapter(bundle, write_lora(model, tmp_path / "lora", LLAMA), out=tmp_path / "a")
    pipeline = stagepack.load(bundle, adapters=[tmp_path / "a"])
    for adapter, says in (
        ("b", "expected one of a, or None for none, found 'b'"),
        (["a", "a"], "expected 3, one for each row, found 2 names"),
        (["a", "a", 1], "expected one of a, or None for none, found 1"),
        (1, "expected the name of an adapter, or a list of names, found int"),
    ):
        with pytest.raises(InputError, match=says):
            logits(pipeline, adapter=adapter)
    with pytest.raises(InputError, match="there is no argument 'adapter'"):
        logits(stagepack.load(bundle), adapter="a")
    with pytest.raises(
        OptionError, match="numpy takes no adapters: leave out adapters, or choose runtime='torch' or 'onn"
    ):
        check_runtimes([NumpyRuntime()], LoadOptions(adapters=["a"]))
    with pytest.raises(OptionError, match="adapters excludes compiled"):
        stagepack.load(bundle, adapters=[tmp_path / "a"], compiled=tmp_path)


class Repeated(torch.nn.Module):
    """A layer that is called three times, with inputs of several numbers of dimensions, and a gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = torch.nn.Linear(4, 6), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(torch.tanh(self.first(x)))
        x = self.shared(x.unsqueeze(1).unsqueeze(1)).flatten(0, 1)
        return self.shared(x)[:, 0]


def test_a_layer_that_is_called_again_is_changed_each_time(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Repeated().eval(), torch.randn(3, 4, requires_grad=True)
    dynamic_shapes = {"x": {0: torch.export.Dim("rows", min=1, max=8)}}
    bundle = stagepack.export(model, (x.detach(),), out=tmp_path / "m.stagepack", dynamic_shapes=dynamic_shapes)
    lora = write_lora(model, tmp_path / "lora", {"first": 2, "shared": 3})
    stagepack.write_adapter(bundle, lora, out=tmp_path / "a")
    pipeline = stagepack.load(bundle, adapters=[tmp_path / "a"])
    with pipeline.inference(for_autograd=False):
        pipeline(x, adapter=[None, "a", "a"])
    with adapted(model, lora):
        expected = model(x)
        [gradient] = torch.autograd.grad(expected.sum(), x)
    assert torch.equal(pipeline(x, adapter="a"), expected)
    mixed = pipeline(x, adapter=[None, "a", "a"])
    torch.testing.assert_close(mixed[1:], expected[1:])
    [found] = torch.autograd.grad(mixed.sum(), x)
    torch.testing.assert_close(found[1:], gradient[1:])


class Named(torch.nn.Module):
    """A model that has an argument `adapter` itself, and no dynamic batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, adapter: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + adapter


def test_a_model_keeps_its_own_argument_of_the_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, own = Named(), torch.randn(2, 4), torch.randn(2, 3)
    bundle = stagepack.export(model, (x, own), out=tmp_path / "m.stagepack", dynamic_shapes={})
    lora = write_lora(model, tmp_path / "lora", {"linear": 2})
    stagepack.write_adapter(bundle, lora, out=tmp_path / "a")
    pipeline = stagepack.load(bundle, adapters=[tmp_path / "a"])
    with adapted(model, lora):
        expected = model(x, own)
    for names in ("a", ["a", "a"]):
        assert torch.equal(pipeline(x, adapter=own, adapter_=names), expected)
    with pytest.raises(InputError, match="expected 1, since the bundle has no batch dimension, found 2 names"):
        pipeline(x, own, adapter_=["a", None])


@pytest.mark.process
def test_processes_run_the_adapters_of_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    bundle = export_model(model, tmp_path, stages=3)
    lora = write_lora(model, tmp_path / "lora", LLAMA)
    stagepack.write_adapter(bundle, lora, out=tmp_path / "a")
    monkeypatch.chdir(tmp_path)  # the processes have another folder
    with adapted(model, lora):
        expected = logits(model)
    with stagepack.load(bundle, adapters=["a"], processes=2) as pipeline:
        assert torch.equal(logits(pipeline, adapter="a"), expected)
        assert torch.equal(logits(pipeline), logits(model))
        mixed = logits(pipeline, adapter=[None, None, "a"])
        torch.testing.assert_close(mixed[2], expected[2])
        answers = [pipeline.submit(input_ids=IDS, attention_mask=MASK, adapter=name) for name in ("a", None, "a", None)]
        assert torch.equal(answers[2].result()["logits"], expected)
        with pytest.raises(InputError, match="expected one of a"):
            logits(pipeline, adapter="b")


def test_the_command_runs_inputs_with_the_adapter_that_it_is_given(tmp_path: Path) -> None:
    model = make_model("llama")
    bundle = export_model(model, tmp_path, stages=3)
    lora = write_lora(model, tmp_path / "lora", LLAMA)
    stagepack.write_adapter(bundle, lora, out=tmp_path / "a")
    save_file({"input_ids": IDS, "attention_mask": MASK}, tmp_path / "x.safetensors")
    with adapted(model, lora):
        expected = logits(model)
    words = [str(bundle.path), "--inputs", str(tmp_path / "x.safetensors"), "--adapter", str(tmp_path / "a")]
    result = run("load", *words, "--outputs", str(tmp_path / "y.safetensors"))
    assert result.exit_code == 0, result.output
    assert "placed:" not in result.output
    assert torch.equal(load_file(tmp_path / "y.safetensors")["output.0"], expected)
    assert run("load", str(bundle.path), "--adapter", str(tmp_path / "a")).exit_code == 0  # the example has none
    assert run("load", str(bundle.path), "--stage", "1", "--adapter", str(tmp_path / "a")).exit_code == 0
    refused = run("load", *words, "--adapter", f"b={tmp_path / 'a'}")
    assert "--inputs runs with one adapter" in refused.output


def test_the_command_makes_adapters_for_the_bundle_that_deltas_make(
    exported: Callable[..., Bundle], tmp_path: Path
) -> None:
    model, bundle = make_model("bert"), exported("bert")
    with torch.no_grad():
        model.get_parameter("classifier.bias").add_(1)
    delta = stagepack.delta(bundle, model.state_dict(), out=tmp_path / "d", version="next").path
    lora = write_lora(model, tmp_path / "lora", {"classifier": 2})
    command = ["adapter", str(lora), "--base", str(bundle.path), "--delta", str(delta), "-o"]
    done = run(*command, str(tmp_path / "a"))
    assert done.exit_code == 0, done.output
    refused = run(*command, str(tmp_path / "merged"), "--merge")
    assert "is composed of deltas: write it first (stagepack apply)" in refused.output
    with adapted(model, lora):
        expected = logits(model)
    pipeline = stagepack.load(bundle, deltas=[delta], adapters=[tmp_path / "a"])
    assert torch.equal(logits(pipeline, adapter="a"), expected)


def test_weights_under_adapters_are_not_updated(tmp_path: Path) -> None:
    """Adapters are made for the weights of one bundle."""
    model = make_model("llama")
    bundle = export_model(model, tmp_path, stages=2)
    lora = write_lora(model, tmp_path / "lora", LLAMA)
    pipeline = stagepack.load(bundle, adapters={"x": stagepack.write_adapter(bundle, lora, out=tmp_path / "a").path})
    before = logits(pipeline, adapter="x")
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    (tmp_path / "new").mkdir()
    with pytest.raises(UpdateError, match="expected a pipeline without adapters"):
        pipeline.update(export_model(model, tmp_path / "new", stages=2))
    assert torch.equal(logits(pipeline, adapter="x"), before)


def test_requests_are_joined_as_without_adapters(tmp_path: Path) -> None:
    bundle = export_model(model := make_model("bert"), tmp_path, stages=2)
    lora = write_lora(model, tmp_path / "lora", {"bert.pooler.dense": 2})
    adapters = {"x": stagepack.write_adapter(bundle, lora, out=tmp_path / "a").path}
    limits = [
        batch_limit(pipeline.bundle, Interface(pipeline.entry_point).edges, 8, pipeline)
        for pipeline in (stagepack.load(bundle), stagepack.load(bundle, adapters=adapters))
    ]
    assert limits == [BatchLimit(8, "")] * 2


def test_few_modules_are_kept_of_the_adapters_that_calls_have_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients choose which are in a call together."""
    monkeypatch.setattr(adapter_module, "_KEPT_FORMS", 3)
    model = make_model("llama")
    bundle = export_model(model, tmp_path, stages=1)
    modules = (
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
        "lm_head",
        "model.layers.0.mlp.down_proj",
    )
    adapters, expected = {}, []
    for number, module in enumerate(modules):
        lora = write_lora(model, tmp_path / f"lora-{number}", {module: 2}, number)
        adapters[f"a{number}"] = stagepack.write_adapter(bundle, lora, out=tmp_path / f"a{number}").path
        with adapted(model, lora):
            expected.append(logits(model))
    built = list[ChangedGraph]()

    def counted(*arguments: Any) -> ChangedGraph:
        built.append(change_graph(*arguments))
        return built[-1]

    monkeypatch.setattr(adapter_module, "change_graph", counted)
    pipeline = stagepack.load(bundle, adapters=adapters)
    for pair in [*itertools.combinations(range(4), 2)] * 2:
        found = logits(pipeline, adapter=[f"a{pair[0]}", f"a{pair[1]}", None])
        for row, number in enumerate(pair):
            torch.testing.assert_close(found[row], expected[number][row], rtol=1e-5, atol=1e-5)
    assert len(built) == 4 + 2 * 6
