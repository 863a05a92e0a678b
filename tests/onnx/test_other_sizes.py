"""ONNX models at all sizes that their bundles allow: right as in torch, or not written, and named."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional

import stagepack
from stagepack.cli.onnx_command import conversion_facts
from stagepack.errors import ExportWarning, StageFailedError
from stagepack.format.reader import Bundle
from stagepack.format.shapes import evaluate_dim
from stagepack.roads.onnx import AddedOnnx
from stagepack.roads.onnx.other_sizes import inputs_at, sizes_to_check
from tests.modules import module_of
from tests.onnx.converted import in_onnxruntime


def recurrent(self: Any, sequences: torch.Tensor) -> Any:
    """Recurrent layers, whose mean over no rows is NaN."""
    states, (hidden, cell) = self.lstm(sequences)
    return states.mean(0), hidden.sum(1), cell, self.gru(sequences)[0].sum(0)


def attention(_: Any, sequences: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention with a mask, summed over rows, so that its results have elements where the batch has none."""
    heads = sequences.unsqueeze(1)
    return functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask[:, None, None]).sum(0)


def reduced(_: Any, sequences: torch.Tensor) -> Any:
    """Reductions of rows, of which there may be none."""
    rows = sequences.flatten(1)
    return rows.mean(0), rows.std(0), (rows > 0).any(0), (rows > 0).all(0), rows.prod(0), rows.sum()


def scattered(_: Any, sequences: torch.Tensor, positions: torch.Tensor) -> Any:
    """A source that is larger than the index."""
    rows = sequences.flatten(1)
    return rows.scatter(1, positions, rows * 2), rows.scatter_add(1, positions, rows)


def divided(_: Any, positions: torch.Tensor, divisors: torch.Tensor) -> Any:
    truncated = torch.div(positions, divisors.clamp(min=1), rounding_mode="trunc")
    return positions // divisors, positions % divisors, torch.fmod(positions, divisors), truncated


def all_parts(
    self: Any,
    image: torch.Tensor,
    sequences: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    divisors: torch.Tensor,
) -> Any:
    return (
        self.pooled(image),
        self.resized(image),
        self.recurrent(sequences),
        self.attention(sequences, mask),
        self.reduced(sequences),
        self.scattered(sequences, positions),
        self.divided(positions, divisors),
        self.narrow(sequences),
        self.largest(image),
    )


def make_parts() -> dict[str, nn.Module]:
    """The parts of a model, with one stage for each of them."""
    layers = {"lstm": nn.LSTM(4, 3, bidirectional=True, batch_first=True), "gru": nn.GRU(4, 3, batch_first=True)}
    return {
        "pooled": module_of(lambda self, image: functional.adaptive_avg_pool2d(image, (2, 3))),
        "resized": module_of(lambda self, image: functional.interpolate(image, size=(5, 6), mode="area")),
        "recurrent": module_of(recurrent, **layers),
        "attention": module_of(attention),
        "reduced": module_of(reduced),
        "scattered": module_of(scattered),
        "divided": module_of(divided),
        # A product for which ONNX Runtime has no kernel on the CPU.
        "narrow": module_of(lambda self, sequences: sequences.to(torch.bfloat16) * 3),
        # Its windows depend on the sizes of the image; torch's exporter takes them from the example.
        "largest": module_of(lambda self, image: functional.adaptive_max_pool2d(image, (2, 3))),
    }


PARTS = ("pooled", "resized", "recurrent", "attention", "reduced", "scattered", "divided", "narrow", "largest")


def inputs(rows: int, height: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(rows * 100 + height)
    return (
        torch.randn(rows, 2, height, 9, generator=draw),
        torch.randn(rows, 5, 4, generator=draw),
        torch.rand(rows, 5, generator=draw) > 0.5,
        torch.randint(0, 20, (rows, 3), generator=draw),
        torch.randint(1, 5, (rows, 3), generator=draw),
    )


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> AddedOnnx:
    torch.manual_seed(0)
    rows, height = Dim("rows", min=0, max=32), Dim("height", min=2, max=40)
    dims = ({0: rows, 2: height}, {0: rows}, {0: rows}, {0: rows}, {0: rows})
    path = tmp_path_factory.mktemp("sizes") / "m.stagepack"
    model = module_of(all_parts, **make_parts()).eval()
    bundle = stagepack.export(model, inputs(2, 10), out=path, split_at=PARTS[1:], dynamic_shapes=dims)
    return stagepack.add_onnx(bundle)


def test_stages_that_differ_at_another_size_or_have_no_kernel_stay_in_torch_and_are_named(added: AddedOnnx) -> None:
    named = {PARTS[stage_number]: reason for stage_number, reason in added.torch_only.items()}
    assert named.keys() == {"narrow", "largest"}
    assert re.match(r"at \w+ = \d+, \w+ = \d+ (its answer differs|it fails)", named["largest"])
    assert "NOT_IMPLEMENTED" in named["narrow"]
    assert {
        stage_number for stage_number, stage in enumerate(added.bundle.stages) if stage.onnx
    } == added.checked.keys()


def test_the_check_says_at_which_sizes_it_ran(added: AddedOnnx) -> None:
    for checked in added.checked.values():
        assert {0, 1, 32} <= {size for sizes in checked.sizes for size in sizes.values()}
        assert checked.unchecked == ()


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 32])
def test_the_answers_are_those_of_torch_at_every_size(added: AddedOnnx, rows: int) -> None:
    runtimes = ["torch" if number in added.torch_only else "onnxruntime" for number in range(len(PARTS))]
    in_onnx, in_torch = stagepack.load(added.bundle, runtime=runtimes), stagepack.load(added.bundle)
    for height in (2, 11, 40):
        found, wanted = in_onnx(*inputs(rows, height)), in_torch(*inputs(rows, height))
        for mine, other in zip(
            torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted), strict=True
        ):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_smallest_integer_divided_by_minus_one_ends_no_process(dtype: torch.dtype, tmp_path: Path) -> None:
    quotients = module_of(lambda self, x, y: (x // y, x % y, torch.fmod(x, y), x // -1))
    pipe = in_onnxruntime(quotients, (torch.arange(1, 4).to(dtype),) * 2, tmp_path)
    smallest, minus_one = torch.full((3,), torch.iinfo(dtype).min, dtype=dtype), torch.full((3,), -1, dtype=dtype)
    found, wanted = (run(smallest, minus_one) for run in (pipe, stagepack.load(tmp_path / "m.stagepack")))
    assert all(torch.equal(mine, other) for mine, other in zip(found, wanted, strict=True))


def test_the_command_says_where_nothing_could_be_checked(added: AddedOnnx) -> None:
    facts = conversion_facts(added)
    assert [fact["sizes"] for fact in facts if fact["torch_only"] is None] == [
        [dict(sizes) for sizes in checked.sizes] for checked in added.checked.values()
    ]
    assert all(fact["unchecked_sizes"] == [] for fact in facts)


def test_a_transposed_convolution_without_an_image_ends_no_process(tmp_path: Path) -> None:
    """In 3D, ONNX Runtime ends by SIGSEGV."""
    model = module_of(lambda self, image: self.layer(image).sum(), layer=nn.ConvTranspose3d(2, 2, 2)).eval()
    depths = {2: Dim("depth", min=0, max=9)}
    in_onnx = in_onnxruntime(model, (torch.rand(1, 2, 4, 3, 3),), tmp_path, dynamic_shapes=(depths,))
    for pipe in (in_onnx, stagepack.load(tmp_path / "m.stagepack")):
        with pytest.raises(StageFailedError):
            pipe(torch.rand(1, 2, 0, 3, 3))
        image = torch.rand(1, 2, 5, 3, 3)
        torch.testing.assert_close(pipe(image), model(image))


@pytest.fixture(scope="module")
def filtered(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    dims = {0: Dim.AUTO, 1: Dim.AUTO, 2: Dim.AUTO}
    path, example = tmp_path_factory.mktemp("filtered"), (torch.rand(3, 3, 10), torch.rand(4, 3, 2))
    model = module_of(lambda self, signals, kernels: functional.conv1d(signals, kernels, padding=2))
    return stagepack.export(model, example, out=path / "m.stagepack", dynamic_shapes=(dims, dims))


def test_a_convolution_without_channels_ends(filtered: Bundle) -> None:
    """ONNX Runtime runs without end, and torch answers without channels."""
    assert "= 0" in stagepack.add_onnx(filtered).torch_only[0]


def test_sizes_that_are_checked_are_bounded_by_their_work(filtered: Bundle) -> None:
    """All sizes of 64 are few bytes, and 2 * 10^9 operations."""
    values = {edge.name: edge for edge in filtered.edges}
    for sizes in sizes_to_check(filtered):
        rows, channels, length = (evaluate_dim(dim, sizes) for dim in values["signals"].shape)
        filters, _, width = (evaluate_dim(dim, sizes) for dim in values["kernels"].shape)
        assert 2 * rows * channels * filters * width * (length + 5 - width) <= 2**31


def test_an_input_without_rows_can_be_written(tmp_path: Path) -> None:
    rows = {0: Dim("rows", min=0, max=9)}
    doubled = module_of(lambda self, rows: rows.mul_(2).sum())
    pipe = in_onnxruntime(doubled, (torch.rand(3, 4, 2),), tmp_path, dynamic_shapes=(rows,))
    assert pipe(torch.rand(0, 4, 2)) == 0
    ones = torch.ones(2, 4, 2)
    assert pipe(ones) == 32
    assert torch.equal(ones, torch.full((2, 4, 2), 2.0))


def test_operators_that_may_end_the_process_are_not_run_at_other_sizes(tmp_path: Path) -> None:
    """Indices of the example are out of range in a smaller image, and torch writes there."""

    def backward(_: Any, gradient: torch.Tensor, image: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        args = image, [2, 2], [1, 1], [1, 1], [1, 1], False, indices
        return torch.ops.aten.max_pool2d_with_indices_backward(gradient, *args)

    pooled, full = torch.rand(2, 7, 6), torch.rand(2, 6, 5)
    example, dims = (pooled, full, torch.randint(0, 30, (2, 7, 6))), {1: Dim.AUTO, 2: Dim.AUTO}
    with pytest.warns(ExportWarning):
        bundle = stagepack.export(
            module_of(backward), example, out=tmp_path / "m.stagepack", dynamic_shapes=(dims, dims, dims)
        )
    inputs = dict(zip([edge.name for edge in bundle.entry_point.inputs], example, strict=True))
    assert sizes_to_check(bundle)
    assert not any(inputs_at(bundle, inputs, sizes) for sizes in sizes_to_check(bundle))
