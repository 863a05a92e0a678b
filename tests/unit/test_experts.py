"""Models with experts are loaded without transformers, and answer as the model does, however their tokens are routed."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.argument_guards import guarded_operator
from stagepack.format.operators import needed_permissions
from stagepack.grouped_product import TRACED_PRODUCT
from stagepack.torch_internals import GROUPED_PRODUCT
from stagepack_loaders.torch.compilation import compile_ahead

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
QUICK = {("GptOss", torch.float16)}


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


class Groups(torch.nn.Module):
    """The product of groups of rows with a matrix each, as models of transformers compute it in traces."""

    def forward(self, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(weight=weight, input=rows, offs=ends)
        return product


def test_a_program_with_experts_is_loaded_without_transformers(tmp_path: Path) -> None:
    moe = pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
    assert inspect.signature(moe._grouped_mm_fallback).parameters.keys() == {"input", "weight", "offs"}

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
    with pytest.raises(RuntimeError):
        guarded_operator(GROUPED_PRODUCT)(*(tensor.to("meta") for tensor in (rows, weight, ends)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [8, 5])
def test_shape_of_a_grouped_product_is_that_of_the_kernel(dtype: torch.dtype, columns: int) -> None:
    # The kernel takes 5 columns only where the elements of a column are one after another.
    rows, weight = torch.randn(8, 16, dtype=dtype), torch.randn(3, columns, 16, dtype=dtype).mT
    args = (rows, weight, torch.tensor([2, 2, 8]).int())
    product = guarded_operator(GROUPED_PRODUCT)
    predicted, computed = product(*(tensor.to("meta") for tensor in args)), product(*args)
    assert (predicted.shape, predicted.dtype) == (computed.shape, computed.dtype)
    if columns == 8:  # the kernel takes no gradients of 5 columns
        torch.library.opcheck(TRACED_PRODUCT, (rows.requires_grad_(), weight.requires_grad_(), args[2]))


@pytest.mark.process
@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:])]
)
def test_compiled_experts_answer_as_others(dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
    bundle = stagepack.export(
        Groups(),
        (torch.randn(8, 8, dtype=dtype), torch.randn(3, 8, 16, dtype=dtype), torch.tensor([2, 2, 8]).int()),
        out=tmp_path / "m.stagepack",
        dynamic_shapes={"rows": {0: torch.export.Dim("rows", min=2, max=64)}, "weight": None, "ends": None},
    )
    units = compile_ahead(bundle, tmp_path / "m.compiled")
    assert [unit.reason for unit in units] == [""]
    plain = stagepack.load(bundle)
    for pipe in (stagepack.load(bundle, compile="whole"), stagepack.load(bundle, compiled=tmp_path / "m.compiled")):
        for row_count in (8, 11):
            rows, weight = torch.randn(row_count, 8, dtype=dtype), torch.randn(3, 8, 16, dtype=dtype)
            for ends in ([2, 2, 8], [0, 8, 8], [1, 5, 5], [0, 0, 0]):
                offsets = torch.tensor(ends, dtype=torch.int32)
                assert torch.equal(pipe(rows, weight, offsets), plain(rows, weight, offsets))


def test_gradients_of_compiled_experts_are_those_of_others(tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
    args = (torch.randn(8, 4), torch.randn(3, 4, 8), torch.tensor([2, 2, 8]).int())
    bundle = stagepack.export(Groups(), args, out=tmp_path / "m.stagepack")
    gradients = []
    for pipe in (stagepack.load(bundle), torch.compile(stagepack.load_stage(bundle, 0), backend="aot_eager")):
        factors = [factor.clone().requires_grad_() for factor in args[:2]]
        result = pipe(*factors, args[2])
        gradients.append(
            torch.autograd.grad(result if torch.is_tensor(result) else result[0], factors, torch.ones(8, 8))
        )
    for plain, compiled in zip(*gradients, strict=True):
        assert torch.equal(plain, compiled)


def test_loaded_experts_are_exported_again(tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
    args = (torch.randn(8, 4), torch.randn(3, 4, 8), torch.tensor([2, 2, 8]).int())
    bundle = stagepack.export(Groups(), args, out=tmp_path / "m.stagepack")
    stage = stagepack.load_stage(bundle, 0)
    again = stagepack.export(stage, args, out=tmp_path / "again.stagepack")
    assert str(GROUPED_PRODUCT) in [op.name for op in again.graph(0).ops]
    assert needed_permissions([again.graph(0)]) == set()
    assert torch.equal(stagepack.load(again)(*args)[0], stagepack.load(bundle)(*args))
