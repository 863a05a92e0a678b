"""Models with experts are loaded without transformers, and answer as the model does, however their tokens are routed."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.format.operators import needed_permissions
from stagepack.torch_internals import GROUPED_PRODUCT
from stagepack_loaders.torch.meta_functions import meta_function

SIZES: Mapping[str, int] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
FAMILIES: Mapping[str, Mapping[str, int]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "GraniteMoe": {"num_local_experts": 4},
    "Olmoe": {"num_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUICK = {("Mixtral", torch.float32), ("GptOss", torch.float16)}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=[] if (family, dtype) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for dtype in DTYPES
    ],
)
def test_experts_are_loaded_without_transformers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    model: Any = getattr(transformers, f"{family}ForCausalLM")(config).eval().to(dtype)
    bundle = stagepack.export(model, out=tmp_path / "m.stagepack", stages=2)
    assert needed_permissions(map(bundle.graph, range(2))) == set()
    pipe = stagepack.load(bundle)
    for seed, shape in enumerate([(1, 3), (2, 7), (5, 2), (3, 16)]):
        tokens = torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(seed))
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        with torch.no_grad():
            expected = model(**inputs).logits
        assert torch.equal(pipe(**inputs)["logits"], expected)


def test_a_program_with_experts_is_loaded_without_transformers(tmp_path: Path) -> None:
    moe = pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
    assert inspect.signature(moe._grouped_mm_fallback).parameters.keys() == {"input", "weight", "offs"}

    class Groups(torch.nn.Module):
        def forward(self, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(weight=weight, input=rows, offs=ends)
            return product

    args = (torch.randn(8, 4), torch.randn(3, 4, 8), torch.tensor([2, 2, 8], dtype=torch.int32))
    program = torch.export.export(Groups(), args)
    assert "transformers.grouped_mm_fallback.default" in {str(node.target) for node in program.graph.nodes}
    bundle = stagepack.export(program, out=tmp_path / "m.stagepack")
    assert [op.name for op in bundle.graph(0).ops] == [str(GROUPED_PRODUCT)]
    pipe = stagepack.load(bundle)
    for ends in ([2, 2, 8], [0, 8, 8], [8, 8, 8], [1, 5, 8]):
        offsets = torch.tensor(ends, dtype=torch.int32)
        assert torch.equal(pipe(*args[:2], offsets), Groups()(*args[:2], offsets))


@pytest.mark.parametrize(
    ("rows", "weight", "ends"),
    [
        (torch.ones(8, 4), torch.ones(3, 5, 8), torch.ones(3, dtype=torch.int32)),
        (torch.ones(8, 4), torch.ones(3, 4, 8), torch.ones(2, dtype=torch.int32)),
        (torch.ones(8, 4), torch.ones(3, 4, 8), torch.ones(3)),
        (torch.ones(8, 4), torch.ones(3, 4, 8, dtype=torch.float16), torch.ones(3, dtype=torch.int32)),
        (torch.ones(8, 4, 1), torch.ones(3, 4, 8), torch.ones(3, dtype=torch.int32)),
        (torch.ones(8, 4, dtype=torch.float64), torch.ones(3, 4, 8), torch.ones(3, dtype=torch.int32)),
    ],
)
def test_groups_that_do_not_fit_have_no_shape(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> None:
    shape_of = meta_function(str(GROUPED_PRODUCT), GROUPED_PRODUCT)
    with pytest.raises(RuntimeError):
        shape_of(*(tensor.to("meta") for tensor in (rows, weight, ends)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_shape_of_a_grouped_product_is_that_of_the_kernel(dtype: torch.dtype) -> None:
    args = (torch.ones(8, 16, dtype=dtype), torch.ones(3, 16, 8, dtype=dtype), torch.tensor([2, 2, 8]).int())
    shape_of = meta_function(str(GROUPED_PRODUCT), GROUPED_PRODUCT)
    predicted, computed = shape_of(*(tensor.to("meta") for tensor in args)), GROUPED_PRODUCT(*args)
    assert (predicted.shape, predicted.dtype) == (computed.shape, computed.dtype)
