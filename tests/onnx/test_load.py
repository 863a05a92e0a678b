"""Stages in ONNX Runtime: they answer as in torch, take numpy arrays and torch tensors, and keep their state."""

import os
import shutil
from pathlib import Path

import numpy
import onnxruntime
import pytest
import torch

import stagepack
from stagepack.errors import DeviceError, DigestError, InputError, OperatorError, OptionError
from stagepack.format.graph import Value
from stagepack_loaders.exchange import to_array, to_elements, to_runtime
from stagepack_loaders.numpy_arrays import NUMPY_ARRAYS
from stagepack_loaders.onnxruntime.stage import OnnxRuntimeStage
from stagepack_loaders.onnxruntime.values import to_numpy, to_ort
from stagepack_loaders.registry import find_runtime
from stagepack_loaders.torch.arrays import TORCH_ARRAYS
from tests.onnx.converted import in_onnxruntime

COUNTING = Path(__file__).parents[2] / "schema" / "frozen" / "1.0" / "counting.stagepack"
X = numpy.arange(60, dtype="float32").reshape(5, 3, 4) % 7 - 3


def in_torch(path: Path, *calls: numpy.ndarray) -> list[list[numpy.ndarray]]:
    pipe = stagepack.load(path)
    return [[result.detach().numpy().copy() for result in pipe(torch.from_numpy(x))] for x in calls]


def test_it_takes_and_gives_numpy_arrays_of_any_size_and_keeps_state(tower: Path) -> None:
    pipe = stagepack.load(tower, runtime="onnxruntime")
    calls = [X, X[:2, :2], X]
    for x, wanted in zip(calls, in_torch(tower, *calls), strict=True):
        for mine, theirs in zip(pipe(x), wanted, strict=True):
            assert isinstance(mine, numpy.ndarray)
            assert numpy.array_equal(mine, theirs)
    pipe.reset_state()
    assert numpy.array_equal(pipe(X)[1], in_torch(tower, X)[0][1])


def test_a_call_with_torch_tensors_gets_torch_tensors(tower: Path) -> None:
    result, total = stagepack.load(tower, runtime="onnxruntime")(torch.from_numpy(X))
    assert isinstance(result, torch.Tensor)
    assert torch.equal(result, torch.from_numpy(in_torch(tower, X)[0][0]))
    assert total.dtype == torch.float32


@pytest.mark.parametrize("numbers", [(0,), (1,), (2,), (0, 2)])
def test_stages_of_both_runtimes_work_together(tower: Path, numbers: tuple[int, ...]) -> None:
    runtimes = ["torch" if number in numbers else "onnxruntime" for number in range(3)]
    pipe = stagepack.load(tower, runtime=runtimes)
    for wanted in in_torch(tower, X, X):
        for given in (X, torch.from_numpy(X))[:1]:
            assert all(numpy.array_equal(mine, theirs) for mine, theirs in zip(pipe(given), wanted, strict=True))
    assert isinstance(pipe(torch.from_numpy(X))[0], torch.Tensor)


def test_state_dict_and_parameters_are_those_in_torch(tower: Path) -> None:
    pipe, other = stagepack.load(tower, runtime="onnxruntime"), stagepack.load(tower)
    pipe(X)
    with torch.no_grad():
        other(torch.from_numpy(X))
    mine, theirs = pipe.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(numpy.array_equal(mine[name], theirs[name].detach().numpy()) for name in theirs)
    assert mine["total"].any()
    assert len(list(pipe.parameters())) == len(list(other.parameters()))
    with pytest.raises(ValueError, match="read-only"):
        mine["first.weight"][:] = 0


def test_the_state_dict_of_a_copy_is_what_was_loaded(tower: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tower, tmp_path / "m"))
    expected = stagepack.load(tower, runtime="onnxruntime").state_dict()
    pipe = stagepack.load(path, runtime="onnxruntime", copy=True)
    unverified = stagepack.load(path, runtime="onnxruntime", copy=True, verify="manifest")
    removed = stagepack.load(path, runtime="onnxruntime", copy=True)
    path.rename(tmp_path / "replaced")
    for loaded in (pipe, unverified, removed):
        weights = loaded.state_dict()
        assert all(numpy.array_equal(weights[name], expected[name]) for name in expected)
        with pytest.raises(ValueError, match="read-only"):
            weights["first.weight"][:] = 0
    for stage in stagepack.open(tmp_path / "replaced").stages:
        for name in stage.weights:
            os.truncate(tmp_path / "replaced" / name, 100)
    for loaded in (pipe, unverified):
        with pytest.raises(DigestError, match="the file was cut short"):
            loaded.state_dict()
    assert numpy.array_equal(pipe(X)[0], stagepack.load(tower, runtime="onnxruntime")(X)[0])


def test_a_stage_alone_is_called_by_position_and_by_name(tower: Path) -> None:
    stage = stagepack.load_stage(tower, 0, runtime="onnxruntime")
    assert isinstance(stage, OnnxRuntimeStage)
    (first,) = stage(X)
    (second,) = stage(x=X)
    assert numpy.array_equal(first, second)
    with pytest.raises(InputError, match="expected the inputs x, found 0 by position"):
        stage()
    with pytest.raises(InputError, match="expected dtype float32, found float64"):
        stage(X.astype("float64"))
    with pytest.raises(InputError, match=r"dimension 2: expected 4 .*, found 3"):
        stage(X[:, :, :3])
    with pytest.raises(InputError, match="expected 1 to 64"):
        stage(numpy.zeros((65, 3, 4), "float32"))


def test_values_are_not_copied_on_their_way(tower: Path) -> None:
    given = to_ort(X, "float32")
    assert given.data_ptr() == X.ctypes.data
    stages = [stagepack.load_stage(tower, number, runtime="onnxruntime") for number in range(2)]
    (made,) = stages[0].run([given])
    edge = stages[0].outputs[0]
    assert to_ort(made, "float32") is made
    assert to_runtime(made, edge, find_runtime("onnxruntime")) is made
    assert to_numpy(made, "float32").ctypes.data == made.data_ptr()
    assert to_array(made, edge, TORCH_ARRAYS).data_ptr() == made.data_ptr()
    tensor = torch.from_numpy(X)
    assert to_runtime(tensor, edge, find_runtime("onnxruntime")).ctypes.data == tensor.data_ptr()
    assert to_runtime(tensor, edge, find_runtime("torch")) is tensor


def test_results_outlive_the_call(tower: Path) -> None:
    pipe = stagepack.load(tower, runtime="onnxruntime")
    kept = [pipe(X[:rows])[0] for rows in (1, 2, 3, 4, 5)]
    copies = [array.copy() for array in kept]
    del pipe
    assert all(numpy.array_equal(array, copied) for array, copied in zip(kept, copies, strict=True))


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "int8", "uint16", "int64", "bool", "complex64"],
)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)])
def test_values_of_all_types_come_back_equal(dtype: str, shape: tuple[int, ...]) -> None:
    wide = torch.rand(*shape, 2)[..., 0].mul(5) if shape else torch.tensor(3.0)
    tensor = wide.to(getattr(torch, dtype))
    tensor = tensor.t() if len(shape) == 2 else tensor  # elements that do not lie one after another
    edge = Value(name="x", dtype=dtype, shape=tuple(tensor.shape))
    value = to_ort(to_array(tensor, edge, NUMPY_ARRAYS), dtype)
    array = to_numpy(value, dtype)
    assert (array.dtype.name, array.shape) == (dtype, tuple(tensor.shape))
    assert numpy.array_equal(to_elements(value, edge), to_elements(tensor, edge))
    again = to_array(to_ort(array, dtype), edge, TORCH_ARRAYS)
    assert again.dtype == tensor.dtype
    assert torch.equal(again.to(torch.complex64), tensor.to(torch.complex64))


@pytest.mark.parametrize(("dtype", "number"), [("symint", 3), ("symfloat", 0.1), ("symbool", True)])
def test_numbers_come_back_as_they_are(dtype: str, number: float) -> None:
    assert to_numpy(to_ort(number, dtype), dtype) == number
    assert type(to_numpy(to_ort(number, dtype), dtype)) is type(number)


def test_what_cannot_be_is_refused_in_one_line(tower: Path) -> None:
    with pytest.raises(OptionError, match="expected the runtime 'torch' or 'onnxruntime', found 'tvm'"):
        stagepack.load(tower, runtime="tvm")
    with pytest.raises(OptionError, match="a runtime, or one for each of 3 stages, found 2"):
        stagepack.load(tower, runtime=["torch", "onnxruntime"])
    with pytest.raises(OptionError, match=r"ONNX Runtime does not compile stages: .* choose runtime='torch'"):
        stagepack.load(tower, runtime="onnxruntime", compile=True)
    with pytest.raises(
        OptionError, match="ONNX Runtime has no modules: leave out modules=True, or choose runtime='torch'"
    ):
        stagepack.load_stage(tower, 0, runtime="onnxruntime", modules=True)
    with pytest.raises(DeviceError, match="ONNX Runtime runs stages on cpu, cuda or cuda:N"):
        stagepack.load(tower, "tpu", runtime="onnxruntime")
    with pytest.raises(OperatorError, match="no ONNX model of stage 0, 1, 2: add ONNX models"):
        stagepack.load(COUNTING, runtime="onnxruntime")
    with pytest.raises(InputError, match="expected a tensor of float32"):
        stagepack.load(tower, runtime="onnxruntime")([1.0])
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        with pytest.raises(DeviceError, match="this onnxruntime has no CUDAExecutionProvider"):
            stagepack.load(tower, ["cuda:0"], runtime="onnxruntime")


@pytest.mark.skipif(
    "CUDAExecutionProvider" not in onnxruntime.get_available_providers(), reason="needs a GPU and onnxruntime-gpu"
)
def test_stages_on_a_gpu_answer_as_on_the_cpu(tower: Path) -> None:
    pipe = stagepack.load(tower, ["cuda:0"], runtime="onnxruntime")
    [[result, total], [_, more]] = in_torch(tower, X, X)
    assert all(numpy.array_equal(mine, theirs) for mine, theirs in zip(pipe(X), (result, total), strict=True))
    on_gpu = pipe(torch.from_numpy(X).cuda())
    assert on_gpu[0].is_cuda
    assert numpy.array_equal(on_gpu[1].cpu().numpy(), more)


def test_a_changed_file_is_seen_before_it_is_run(tower: Path, tmp_path: Path) -> None:
    for name in ("stage-1.onnx", "stage-1.safetensors"):
        path = shutil.copytree(tower, tmp_path / name)
        content = bytearray((path / name).read_bytes())
        content[-1] ^= 1
        (path / name).write_bytes(content)
        with pytest.raises(stagepack.errors.DigestError, match=name):
            stagepack.load(path, runtime="onnxruntime")


class Kept(torch.nn.Module):
    """Rows that a call writes into a buffer; `how` says what else it does with the buffer."""

    rows: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("rows", torch.zeros(4, 2) if how != "begins with ones" else torch.ones(4, 2))

    def forward(self, places: torch.Tensor, new_rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        old_rows = self.rows[torch.tensor([0, 1])]
        earlier = self.rows * 2 if self.how == "is read before" else old_rows
        written = new_rows + old_rows if self.how != "is read beside" else new_rows
        self.rows.index_put_((places,), written)
        if self.how == "is returned":
            return self.rows[:2] + 1, self.rows
        return self.rows[:2] + 1, earlier + 1


@pytest.mark.parametrize(
    ("how", "in_place"),
    [
        ("is read for what is written", True),
        ("begins with ones", False),
        ("is read before", False),
        ("is read beside", False),
        ("is returned", False),
    ],
)
def test_a_cache_is_written_where_it_is(tmp_path: Path, how: str, in_place: bool) -> None:
    args = torch.tensor([1, 0]), torch.arange(4.0).reshape(2, 2)
    pipe = in_onnxruntime(Kept(how).eval(), args, tmp_path)
    [stage], expected = pipe.stages, stagepack.load(tmp_path / "m.stagepack")
    with torch.no_grad():
        for _ in range(3):
            before = stage.state["rows"].data_ptr()
            for found, wanted in zip(pipe(*args), expected(*args), strict=True):
                assert torch.equal(found, wanted)
            assert (stage.state["rows"].data_ptr() == before) == in_place
        with pipe.sequence() as first, expected.sequence() as first_expected:
            for _ in range(2):  # the state of the pipeline itself stays
                assert torch.equal(first(*args)[0], first_expected(*args)[0])
                assert torch.equal(pipe(*args)[0], expected(*args)[0])
        pipe.reset_state()
        expected.reset_state()
        assert torch.equal(pipe(*args)[0], expected(*args)[0])
