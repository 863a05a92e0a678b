"""New weights for the graphs of a bundle."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import stagepack
from stagepack.cli import main
from stagepack.errors import CaptureError, OptionError
from stagepack.format.reader import Bundle
from tests.zoo.cases import named


def saved(folder: Path, seed: int) -> str:
    torch.manual_seed(seed)
    model, _ = named("decoders-llama-tied")[0].build()
    model.save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


def exported(source: str, out: Path) -> Bundle:
    return stagepack.export(source, out=out, stages=2)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle whose model is in the folder beside it."""
    folder = tmp_path_factory.mktemp("old")
    return exported(saved(folder / "model", 0), folder / "old.stagepack")


def test_a_tuned_model_becomes_the_bundle_of_its_own_export(old: Bundle, tmp_path: Path) -> None:
    source = saved(tmp_path / "tuned", 1)
    expected = exported(source, tmp_path / "expected.stagepack")
    found = stagepack.export(source, graph_from=old, out=tmp_path / "found.stagepack")
    assert found.digest == expected.digest != old.digest
    assert sorted(path.name for path in tmp_path.glob(".*")) == []


def test_a_model_that_computes_otherwise_is_refused(old: Bundle, tmp_path: Path) -> None:
    source = saved(tmp_path / "tuned", 1)
    path = tmp_path / "tuned" / "config.json"
    config = json.loads(path.read_text())
    for changes, message in (
        (
            {"hidden_act": "gelu"},
            r'computes otherwise .* hidden_act is "gelu" in its config.json, in the bundle (null|"silu")',
        ),
        ({"rms_norm_eps": 0.5}, r"rms_norm_eps is 0.5 in its config.json"),
    ):
        path.write_text(json.dumps(config | changes))
        with pytest.raises(CaptureError, match=message):
            stagepack.export(source, graph_from=old, out=tmp_path / "m.stagepack")
    assert not (tmp_path / "m.stagepack").exists()
    # What answers do not depend on.
    harmless = {"transformers_version": "5.0.0", "eos_token_id": 7, "attention_dropout": 0.1, "use_cache": False}
    path.write_text(json.dumps(config | harmless))
    stagepack.export(source, graph_from=old, out=tmp_path / "m.stagepack")


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).eval()


def test_a_checkpoint_becomes_a_bundle(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    old = stagepack.export(net(), (x,), out=tmp_path / "old.stagepack", stages=2)
    tuned = net()
    save_file({f"model.{name}": tensor for name, tensor in tuned.state_dict().items()}, tmp_path / "c.safetensors")
    arguments = [
        "export",
        str(tmp_path / "c.safetensors"),
        "--graph-from",
        str(old.path),
        "-o",
        str(tmp_path / "m.stagepack"),
    ]
    main(arguments, standalone_mode=False)
    found = stagepack.open(tmp_path / "m.stagepack")
    found.verify()
    assert found.digest == stagepack.export(tuned, (x,), out=tmp_path / "expected.stagepack", stages=2).digest
    assert torch.equal(stagepack.load(found)(x), tuned(x))


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    old = stagepack.export(net(), (torch.randn(3, 4),), out=tmp_path / "old.stagepack")
    state = net().state_dict()
    state["0.weight"] = torch.zeros(8, 5)
    state["2.bias"] = state["2.bias"].double()
    state["3.bias"] = state.pop("0.bias")
    save_file(state, tmp_path / "c.safetensors")
    with pytest.raises(CaptureError) as caught:
        stagepack.export(tmp_path / "c.safetensors", graph_from=old, out=tmp_path / "m.stagepack")
    for problem in (
        "the graph lacks 3.bias;",
        "the checkpoint lacks 0.bias;",
        "0.weight is float32[8, 5], in the graph float32[8, 4]",
        "2.bias is float64[2], in the graph float32[2]",
    ):
        assert problem in str(caught.value)
    assert not (tmp_path / "m.stagepack").exists()
    with pytest.raises(OptionError, match="leave out"):
        stagepack.export(tmp_path / "c.safetensors", graph_from=old, stages=2, out=tmp_path / "m.stagepack")
    with pytest.raises(OptionError, match="found Sequential"):
        stagepack.export(net(), graph_from=old, out=tmp_path / "m.stagepack")


def test_tied_weights_that_are_no_longer_equal_are_refused(old: Bundle, tmp_path: Path) -> None:
    state = load_file(old.path.with_name("model") / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "same.safetensors")
    found = stagepack.export(tmp_path / "same.safetensors", graph_from=old, out=tmp_path / "same.stagepack")
    assert found.digest == old.digest
    state["lm_head.weight"][0, 0] += 1
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(CaptureError, match="are one weight in the graph, and differ"):
        stagepack.export(tmp_path / "other.safetensors", graph_from=old, out=tmp_path / "m.stagepack")


class Normalized(torch.nn.Module):
    """Batch norm, whose running means are zeros before training, in a stage without other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4, affine=False)
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(x))


def test_buffers_that_were_zeros_are_stored(tmp_path: Path) -> None:
    model, args = Normalized().eval(), (torch.randn(3, 4),)
    old = stagepack.export(model, args, out=tmp_path / "old.stagepack", split_at=["layer"])
    model.norm.running_mean = torch.randn(4)
    save_file(model.state_dict(), tmp_path / "new.safetensors")
    found = stagepack.export(str(tmp_path / "new.safetensors"), graph_from=old, out=tmp_path / "found.stagepack")
    expected = stagepack.export(model, args, out=tmp_path / "expected.stagepack", split_at=["layer"])
    assert torch.equal(stagepack.load(found)(*args), model(*args))
    assert found.digest == expected.digest
