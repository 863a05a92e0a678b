"""Weights, modules and checkpoints of a bundle have the names of the user's model, whatever captured it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import stagepack
from stagepack.errors import CaptureError, CutError
from stagepack.format.reader import Bundle
from stagepack.format.rules import split_call_path
from tests.modules import module_of
from tests.text.generating_families import family_bundle, make_model

PROMPT = torch.tensor([[5, 9, 31, 42]])


def llama(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, num_attention_heads=4)).eval()


@pytest.fixture(scope="module")
def generating(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A Llama that generates, cut at a module by the name that it has in the model."""
    path = tmp_path_factory.mktemp("names") / "llama.stagepack"
    return stagepack.export(llama(0), out=path, generate=16, split_at=["model.layers.1"])


def saved_names(bundle: Bundle) -> set[str]:
    """The names of the parameters and persistent buffers."""
    graphs = [graph for point in bundle.entry_points for graph in bundle.select(point.name).graphs()]
    weights = [weight for graph in graphs for weight in graph.weights if weight.kind in ("parameter", "buffer")]
    return {name for weight in weights for name in weight.names}


def module_paths(bundle: Bundle) -> set[str]:
    graphs = [graph for point in bundle.entry_points for graph in bundle.select(point.name).graphs()]
    return {split_call_path(scope.path)[0] for graph in graphs for scope in graph.scopes}


def test_a_bundle_that_generates_has_the_names_of_its_model(generating: Bundle) -> None:
    model = llama(0)
    assert saved_names(generating) == model.state_dict().keys()
    assert module_paths(generating) <= dict(model.named_modules()).keys()
    assert generating.stages[0].state == ("cache.0.tokens",)
    pipe = stagepack.load(generating)
    assert torch.equal(
        pipe.generate(PROMPT, max_new_tokens=5), model.generate(PROMPT, max_new_tokens=5, do_sample=False)
    )


@pytest.mark.parametrize("family", ["t5", pytest.param("whisper", marks=pytest.mark.slow)])
def test_encoders_and_decoders_have_the_names_of_their_model(
    family: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    parts = stagepack.open(family_bundle(tmp_path_factory, family))
    model = make_model(family)
    names = dict(model.named_modules()).keys()
    assert saved_names(parts) == model.state_dict().keys()
    assert module_paths(parts) <= names
    at_decoder = next(name for name in names if name.endswith("decoder.layers.1") or name.endswith("decoder.block.1"))
    cut = stagepack.recut(parts.select("decode"), out=tmp_path / "m.stagepack", split_at=[at_decoder])
    assert len(cut.select("decode").stages) == 2


def test_fine_tuned_weights_fit_a_bundle_that_generates(generating: Bundle, tmp_path: Path) -> None:
    tuned = llama(1)
    tuned.save_pretrained(tmp_path / "tuned")
    bundle = stagepack.export(tmp_path / "tuned", graph_from=generating, out=tmp_path / "m.stagepack")
    expected = tuned.generate(PROMPT, max_new_tokens=5, do_sample=False)
    assert torch.equal(stagepack.load(bundle).generate(PROMPT, max_new_tokens=5), expected)
    open_checkpoint: Any = AutoModelForCausalLM.from_pretrained
    opened, report = open_checkpoint(bundle.path, output_loading_info=True)
    assert not any(report.values()), report
    assert all(torch.equal(tensor, opened.state_dict()[name]) for name, tensor in tuned.state_dict().items())


class Wrapper(torch.nn.Module):
    """Calls a model by an attribute, as modules that generate did in earlier bundles."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids, use_cache=False).logits
        return logits


def test_weights_without_the_prefix_of_the_graph_fit(tmp_path: Path) -> None:
    old = stagepack.export(Wrapper(llama(0)), (PROMPT,), out=tmp_path / "old.stagepack", stages=2)
    assert "model.model.layers.1.mlp.up_proj.weight" in saved_names(old)
    tuned = llama(1)
    tuned.save_pretrained(tmp_path / "tuned")
    save_file(tuned.state_dict(), tmp_path / "tuned.safetensors")
    for source in ("tuned", "tuned.safetensors"):
        bundle = stagepack.export(tmp_path / source, graph_from=old, out=tmp_path / "m.stagepack", overwrite=True)
        assert torch.equal(stagepack.load(bundle)(PROMPT), Wrapper(tuned)(PROMPT))
    state = tuned.state_dict()
    del state["lm_head.weight"]
    save_file(state, tmp_path / "tuned.safetensors")
    prefix = r"with 'model\.' before the names in the checkpoint, 29 of the 30 would fit"
    names = r"the checkpoint lacks (\S+, ){2}\S+ and 27 more; the graph lacks (\S+, ){2}\S+ and 26 more"
    with pytest.raises(CaptureError, match=f"{names}; {prefix}"):
        stagepack.export(tmp_path / "tuned.safetensors", graph_from=old, out=tmp_path / "m.stagepack", overwrite=True)


def test_a_checkpoint_of_a_part_names_the_prefix(tmp_path: Path) -> None:
    inner = torch.nn.Linear(3, 3)
    torch.save(
        {f"net.{name}": tensor for name, tensor in inner.state_dict().items()} | {"n": torch.ones(1)}, tmp_path / "c.pt"
    )
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    save_file({f"module.{name}": tensor for name, tensor in model.state_dict().items()}, tmp_path / "m.safetensors")
    bundle = stagepack.export(
        lambda: torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)),
        (torch.ones(2, 3),),
        weights=tmp_path / "m.safetensors",
        out=tmp_path / "m.stagepack",
    )
    assert torch.equal(stagepack.load(bundle)(torch.ones(2, 3)), model(torch.ones(2, 3)))
    says = r"the checkpoint lacks 0\.weight, 0\.bias, 1\.weight and 1 more; the model lacks net\.weight"
    with pytest.raises(CaptureError, match=says):
        stagepack.export(
            lambda: torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)),
            (torch.ones(2, 3),),
            weights=tmp_path / "c.pt",
            out=tmp_path / "n.stagepack",
        )


def test_a_program_without_modules_says_so(tmp_path: Path) -> None:
    plain = module_of(lambda self, x: x.relu().exp())
    with pytest.raises(CutError, match="no operator comes from a module 'layer': the operators name no modules"):
        stagepack.export(plain, (torch.ones(2),), out=tmp_path / "m.stagepack", split_at=["layer"])
