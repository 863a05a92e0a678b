"""What stands at the edges of what ONNX can say, and bundles that others change, stop or share meanwhile."""

import math
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import onnx
import pytest
import torch

import stagepack
from stagepack.errors import InputError
from stagepack.format.reader import Bundle
from stagepack_loaders.comparison import compare_arrays
from stagepack_loaders.numpy_arrays import NUMPY_ARRAYS
from stagepack_loaders.torch.arrays import TORCH_ARRAYS
from tests.laws.sized_models import Recurrent
from tests.modules import module_of
from tests.onnx.converted import in_onnxruntime


def test_results_may_be_weights_inputs_zeros_and_integers(tmp_path: Path) -> None:
    def run(self: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + self.x, self.zeros, y @ self.whole.t(), self.x, self.nobody, x, x

    buffers = {"zeros": torch.zeros(1000), "whole": torch.arange(12).reshape(3, 4), "nobody": torch.zeros(0, 3)}
    net = module_of(run, **buffers, x=torch.ones(3))  # named like an edge
    args = torch.randn(2, 3), torch.arange(8).reshape(2, 4)
    found = in_onnxruntime(net, args, tmp_path, stages=2)(*(one.numpy() for one in args))
    wanted = net(*args)
    assert all(numpy.array_equal(mine, theirs.numpy()) for mine, theirs in zip(found, wanted, strict=True))
    assert [array.dtype.name for array in found] == [str(one.dtype).removeprefix("torch.") for one in wanted]


@pytest.mark.parametrize("as_torch", [True, False])
def test_what_is_written_into_an_input_is_there_after_the_call(as_torch: bool, tmp_path: Path) -> None:
    writes = module_of(lambda self, x, y: x.mul_(2) + y)
    pipe = in_onnxruntime(writes, (torch.ones(2, 3), torch.ones(2, 3)), tmp_path)

    def given(tensor: torch.Tensor) -> Any:
        return tensor if as_torch else tensor.numpy()

    x, y = torch.full((2, 3), 3.0), torch.ones(2, 3)
    assert float(pipe(given(x), given(y))[0, 0]) == 7.0
    assert torch.equal(x, torch.full((2, 3), 6.0))
    both = torch.ones(4, 3)
    with pytest.raises(InputError, match="share memory"):
        pipe(given(both[:2]), given(both[1:3]))
    fixed = torch.ones(3).expand(2, 3)
    with pytest.raises(InputError, match="x: the model writes into this input, and it cannot be written: give a copy"):
        pipe(given(fixed), given(y))
    assert torch.equal(both, torch.ones(4, 3))


def test_a_loaded_stage_stays_what_it_is_when_its_bundle_is_replaced(tower: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tower, tmp_path / "t.stagepack"))
    x = numpy.arange(12, dtype="float32").reshape(1, 3, 4)
    pipe = stagepack.load(path, runtime="onnxruntime")
    answer, weights = pipe(x), pipe.state_dict()
    other = torch.nn.Sequential(torch.nn.Linear(4, 4))
    stagepack.export(other, (torch.ones(1, 4),), out=path, overwrite=True)
    for removed in (False, True):
        if removed:
            shutil.rmtree(path)
        pipe.reset_state()
        assert all(numpy.array_equal(mine, first) for mine, first in zip(pipe(x), answer, strict=True))
        assert all(numpy.array_equal(array, weights[name]) for name, array in pipe.state_dict().items())


class Named(torch.nn.Module):
    """Modules and weights with the names that the exporter gives to values."""

    def __init__(self) -> None:
        super().__init__()
        self.s0 = torch.nn.Module()
        for name in ("val_0", "add", "relu", "linear"):
            self.s0.register_parameter(name, torch.nn.Parameter(torch.rand(3)))
        self.w3, self.w0, self.linear = (torch.nn.Parameter(torch.rand(3)) for _ in range(3))
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        val_0, add, relu, linear = (self.s0.get_parameter(name) for name in ("val_0", "add", "relu", "linear"))
        x = self.layer(x).relu() * val_0 + add
        return (x * self.w3 + relu).relu() * self.w0 + linear * self.linear


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_a_recurrent_layer_takes_sequences_of_any_length_or_stays_in_torch(
    layer: Callable[..., torch.nn.Module], tmp_path: Path
) -> None:
    """The exporter unrolls an RNN to the steps of the example, as it would all of them."""
    net = Recurrent(layer(4, 6, batch_first=True))
    length = torch.export.Dim("length", min=2, max=64)
    bundle = stagepack.export(net, (torch.randn(2, 5, 4),), dynamic_shapes=({1: length},), out=tmp_path / "m.stagepack")
    added = stagepack.add_onnx(bundle)
    assert list(added.torch_only) == ([0] if layer is torch.nn.RNN else [])
    if not added.torch_only:
        x = torch.randn(2, 11, 4)
        answer = stagepack.load(added.bundle, runtime="onnxruntime")(x.numpy())
        numpy.testing.assert_allclose(answer, net(x).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_names_do_not_meet(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    net = Named()
    pipe = in_onnxruntime(net, (x,), tmp_path)
    initializers = onnx.load(tmp_path / "m.stagepack" / "stage-0.onnx", load_external_data=False).graph.initializer
    assert {tensor.name for tensor in initializers} == set(net.state_dict())
    with torch.no_grad():
        assert numpy.allclose(pipe(x.numpy()), net(x).numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_row_that_sees_nothing_is_zero_as_in_torch(kind: str, tmp_path: Path) -> None:
    x, mask = torch.randn(1, 2, 4, 8), torch.ones(1, 1, 4, 4, dtype=torch.bool)

    def given(mask: torch.Tensor) -> torch.Tensor:
        return mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)

    attention = torch.nn.functional.scaled_dot_product_attention
    attends = module_of(lambda self, x, mask: attention(x, x, x, attn_mask=mask))
    pipe = in_onnxruntime(attends, (x, given(mask)), tmp_path)
    mask[..., 1, :] = False
    mask[..., 2, 0] = False
    found = pipe(x.numpy(), given(mask).numpy())
    assert numpy.allclose(found, attends(x, given(mask)).numpy(), atol=1e-5)
    assert not found[:, :, 1].any()


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One stage with an ONNX file: to add those of the tower takes six times as long."""
    path = tmp_path_factory.mktemp("layer") / "l.stagepack"
    return stagepack.export(torch.nn.Linear(3, 3), (torch.ones(2, 3),), out=path, onnx=True).path


def test_what_is_stopped_midway_leaves_the_bundle_as_it_was(linear: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(linear, tmp_path / "l.stagepack"))
    before = Bundle(path).digest

    def stop(what: str) -> None:
        if what == "run the example":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stagepack.add_onnx(path, progress=stop)
    assert Bundle(path).digest == before
    Bundle(path).verify()
    assert [one.name for one in tmp_path.iterdir()] == ["l.stagepack"]


def test_a_link_stands_for_the_bundle(linear: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(linear, tmp_path / "l.stagepack"))
    (tmp_path / "link").symlink_to(path)
    added = stagepack.add_onnx(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert added.torch_only == {}
    Bundle(path).verify()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["l.stagepack", "link"]


@pytest.mark.parametrize("first", ["torch", "onnxruntime"])
def test_what_a_stage_of_either_runtime_writes_the_caller_sees(first: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(module_of(lambda self, x: x.mul_(2) + 1), torch.nn.Linear(3, 3))
    bundle = stagepack.export(net, (torch.ones(2, 3),), out=tmp_path / "m.stagepack", split_at=["1"], onnx=True)
    pipe = stagepack.load(bundle, runtime=[first, "onnxruntime"])
    for order in ("C", "F"):
        x = numpy.asarray(numpy.arange(6.0, dtype="float32").reshape(2, 3), order=order)
        given = torch.from_numpy(x.copy())
        with torch.no_grad():
            wanted, found = net(given).numpy(), pipe(x)
        assert numpy.allclose(found, wanted, atol=1e-6)
        assert numpy.array_equal(x, given.numpy())
    fixed = numpy.ones((2, 3), "float32")
    fixed.flags.writeable = False
    if first == "onnxruntime":
        with pytest.raises(InputError, match="cannot be written"):
            pipe(fixed)
    else:
        with torch.no_grad():
            pipe(fixed)
    assert (fixed == 1).all()


def test_calls_from_several_threads_lose_nothing(tower: Path) -> None:
    stage = stagepack.load_stage(tower, 2, runtime="onnxruntime")
    ones = numpy.ones((1, 2, 4), "float32")
    (_, once) = stage(ones)
    stage.reset_state()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: stage(ones), range(400)))
    assert numpy.array_equal(stage(ones)[1], once * 401)


def test_zeros_of_both_signs_stay_apart(tmp_path: Path) -> None:
    def signed_zeros(_: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = [torch.where(x > 0, x, zero) for zero in (0.0, -0.0)]
        zeros += [torch.full_like(x, zero) for zero in (0.0, -0.0)] + [x * 0.0, x * -0.0]
        return tuple(1 / zero for zero in zeros)

    net, x = module_of(signed_zeros), torch.tensor([[1.0, -2.0], [3.0, -4.0]])
    assert all(map(torch.equal, in_onnxruntime(net, (x,), tmp_path)(x), net(x)))


@pytest.mark.parametrize("expected", [math.inf, -math.inf])
@pytest.mark.parametrize("actual", [0.0, 1e38, math.inf, -math.inf, math.nan])
def test_an_infinity_is_near_itself_alone(actual: float, expected: float) -> None:
    found, wanted = torch.tensor([1.0, actual]), torch.tensor([1.0, expected])
    for arrays, convert in ((TORCH_ARRAYS, torch.Tensor.detach), (NUMPY_ARRAYS, torch.Tensor.numpy)):
        difference = compare_arrays(arrays, convert(found), convert(wanted))
        assert difference == ((0.0, True) if actual == expected else (math.inf, False))


def test_stage_that_depends_on_the_layout_of_its_inputs_stays_in_torch(tmp_path: Path) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    strided = module_of(lambda self, x: (x * 2).as_strided((2, 2), (1, 2)))
    added = stagepack.add_onnx(stagepack.export(strided, (x,), out=tmp_path / "m.stagepack"))
    assert "row-major memory" in added.torch_only[0]
    transposed = x.t().contiguous().t()
    assert torch.equal(stagepack.load(added.bundle)(transposed), strided(transposed))


def test_one_bound_leaves_infinity_and_nan(tmp_path: Path) -> None:
    def bounded(_: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x.clamp(min=0.0),
            x.clamp_max(2.5),
            x.clamp(min=-1).clamp_(max=3),
            x.half().clamp(max=1),
            x.clamp(max=len(x)),
        )

    x = torch.tensor([-math.inf, math.nan, -2.0, math.inf])
    rows = ({0: torch.export.Dim("rows", min=1, max=64)},)
    bundle = stagepack.export(
        module_of(bounded), (torch.ones(4),), out=tmp_path / "m.stagepack", dynamic_shapes=rows, onnx=True
    )
    expected, found = (stagepack.load(bundle, runtime=runtime)(x) for runtime in ("torch", "onnxruntime"))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)
