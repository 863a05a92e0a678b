"""Quantized weights of torchao are right or refused by name, as `docs/coverage.md` says of each configuration."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import OperatorError
from tests.libraries.quantized import CASES, ELSEWHERE, HEADING, PAGE, Quantized, refusal, row
from tools.benchmark_models import llama

# torchao warns of its CUDA libraries, and of configurations that it calls prototypes.
pytestmark = pytest.mark.filterwarnings("ignore")
_QUICK = ("int8", "int4-packed")


@pytest.fixture(scope="module")
def stated() -> str:
    """What the page says."""
    return PAGE.read_text().partition(HEADING)[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in _QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_configuration_does_what_the_page_says(case: Quantized, stated: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    found = row(case, tmp_path, processes=False)
    assert found in re.sub(r"\| right (\| [^|]* \|\n)", r"|  \1", stated)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_configuration_does_what_the_page_says_in_processes(case: Quantized, stated: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    assert row(case, tmp_path) in stated


@pytest.mark.parametrize("case", ELSEWHERE, ids=lambda case: case.name)
def test_what_torchao_makes_elsewhere_is_refused(case: Quantized, stated: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    assert refusal(case, tmp_path) in stated


def test_packed_parts_have_the_names_of_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    [case] = [case for case in CASES if case.name == "int4-packed"]
    model = case.model()
    bundle = stagepack.export(model, (torch.randn(4, 256),), out=tmp_path / "m.stagepack", stages=3)
    names = [name for weight in bundle.graph(0).weights for name in weight.names if name.startswith("layers.0.0.")]
    assert names == ["layers.0.0.weight.qdata", "layers.0.0.weight.scale_and_zero", "layers.0.0.bias"]
    stored = stagepack.load_stage(bundle, 0).state_dict()["layers.0.0.weight.qdata"]
    packed: Any = model.get_submodule("layers.0.0").weight
    assert torch.equal(stored, packed.qdata)


class Tiles(torch.nn.Module):
    """A product with weights in the tiles of four bits that only a GPU multiplies, as `tile_packed_to_4d` of torchao has them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qdata", torch.ones(16, 2, 32, 4, dtype=torch.int32))
        self.register_buffer("scale_and_zero", torch.ones(2, 128, 2, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, self.qdata, 128, self.scale_and_zero)


def test_a_layout_of_another_device_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    operator = "aten._weight_int4pack_mm"
    with torch.library._scoped_library("aten", "IMPL") as library:
        # In the place of the GPU that the bundle is made on.
        library.impl("_weight_int4pack_mm", lambda x, *_: x.new_ones(x.shape[0], 128), "CPU")
        bundle = stagepack.export(Tiles(), (torch.ones(4, 256, dtype=torch.bfloat16),), out=tmp_path / "m.stagepack")
    says = rf"stage-0.msgpack: the operator {operator}.default has no kernel for cpu in torch .*: load the bundle on a"
    with pytest.raises(OperatorError, match=says):
        stagepack.load(bundle, allow_ops=[operator])


@pytest.mark.slow
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_a_quantized_folder_of_transformers_is_a_source(config: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    llama(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, vocab_size=100).save_pretrained(
        tmp_path / "plain"
    )
    wanted = transformers.TorchAoConfig(getattr(quantization, config)())
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "plain", quantization_config=wanted, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "quantized")
    bundle = stagepack.export(tmp_path / "quantized", out=tmp_path / "m.stagepack", stages=2)
    tokens = torch.randint(3, 90, (2, 7))
    expected = model(tokens, use_cache=False).logits
    assert torch.equal(
        stagepack.load(bundle)(input_ids=tokens, attention_mask=torch.ones_like(tokens))["logits"], expected
    )
    generating = stagepack.export(model, out=tmp_path / "g.stagepack", stages=2, generate=32)
    generated = stagepack.load(generating).generate(tokens, max_new_tokens=6)
    assert torch.equal(generated, model.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None))
    # The parts of the weights are no checkpoint that transformers reads.
    with pytest.raises((OSError, ValueError)):
        load(bundle.path)
