"""Values that cross between runtimes: by their elements, on the same memory, of every dtype."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
import torch
from onnxruntime import OrtValue

from stagepack.errors import InputError, MissingPackageError
from stagepack.format.dtypes import HEADER_DTYPES, HEADER_ITEM_SIZE
from stagepack.format.graph import Value
from stagepack_loaders import registry
from stagepack_loaders.base import ArrayOps
from stagepack_loaders.exchange import array_ops_of, to_array, to_elements, to_runtime
from stagepack_loaders.numpy_arrays import NUMPY_ARRAYS
from stagepack_loaders.onnxruntime.arrays import ONNX_RUNTIME_ARRAYS
from stagepack_loaders.onnxruntime.values import to_ort
from stagepack_loaders.registry import find_runtime, import_runtime, register_runtime
from stagepack_loaders.torch.arrays import TORCH_ARRAYS
from tests.bundle_editor import encode_header, weight_file
from tests.runtimes.numpy_runtime.runtime import NumpyRuntime

DTYPES = ["bool", "uint8", "int64", "uint16", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]


def tensor_of(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count).remainder(3).reshape(shape).to(getattr(torch, dtype))


def value_type(dtype: str, shape: tuple[int, ...]) -> Value:
    return Value(name="x", dtype=dtype, shape=shape)


@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)])
@pytest.mark.parametrize("dtype", [*DTYPES, *FLOAT8, "complex32"])
def test_a_tensor_comes_back_from_its_elements_on_its_memory(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = tensor_of(dtype, shape)
    again = TORCH_ARRAYS.from_elements(TORCH_ARRAYS.to_elements(tensor, dtype), value_type(dtype, shape))
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert again.data_ptr() == tensor.data_ptr()
    assert (again.stride() == tensor.stride()) or not tensor.numel()


@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)])
@pytest.mark.parametrize("dtype", [*DTYPES, *FLOAT8])
def test_arrays_cross_to_torch_and_back(dtype: str, shape: tuple[int, ...]) -> None:
    kind, tensor = value_type(dtype, shape), tensor_of(dtype, shape)
    array = to_array(tensor, kind, NUMPY_ARRAYS)
    assert (array.dtype.name, array.shape) == (dtype, shape)
    again = to_array(array, kind, TORCH_ARRAYS)
    assert (again.dtype, again.data_ptr()) == (tensor.dtype, tensor.data_ptr())
    through_onnx = to_array(to_ort(array, dtype), kind, TORCH_ARRAYS)
    assert torch.equal(through_onnx.to(torch.complex64), tensor.to(torch.complex64))
    assert numpy.array_equal(to_elements(array, kind), to_elements(tensor, kind))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "bool"])
def test_strided_memory_is_shared(dtype: str) -> None:
    kind, tensor = value_type(dtype, (3, 4)), tensor_of(dtype, (4, 3)).t()
    array = to_array(tensor, kind, NUMPY_ARRAYS)
    array[0] = 1
    assert bool((tensor[0] == 1).all())
    again = to_runtime(array, kind, find_runtime("torch"))
    again[1] = 0
    assert bool((tensor[1] == 0).all())
    fortran = numpy.asfortranarray(array.copy())
    to_array(fortran, kind, TORCH_ARRAYS)[2] = 1
    assert bool((fortran[2] == 1).all())


def test_memory_that_must_not_be_written_is_not() -> None:
    kind = value_type("float32", (2,))
    leaf = torch.ones(2, requires_grad=True)
    assert not to_array(leaf, kind, NUMPY_ARRAYS).flags.writeable
    fixed = numpy.ones(2, "float32")
    fixed.flags.writeable = False
    to_array(fixed, kind, TORCH_ARRAYS)[0] = 5
    to_array(numpy.ones(4, "float32")[::-2], kind, TORCH_ARRAYS)[0] = 5
    assert fixed[0] == 1


@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e5m2"])
@pytest.mark.parametrize("shape", [(1,), (4, 3)])
def test_values_cross_by_dlpack_too(dtype: str, shape: tuple[int, ...]) -> None:
    """As between devices: each side sees the elements of the other as an object with ``__dlpack__``."""
    kind, tensor = value_type(dtype, shape), tensor_of(dtype, shape)
    assert torch.equal(
        TORCH_ARRAYS.from_elements(TORCH_ARRAYS.device_elements(tensor, dtype), kind).to(torch.complex64),
        tensor.to(torch.complex64),
    )
    if not ONNX_RUNTIME_ARRAYS.takes_device_memory(dtype):
        assert dtype == "bool" or dtype.startswith("float8")
        return
    value = ONNX_RUNTIME_ARRAYS.from_elements(OnDevice(TORCH_ARRAYS.device_elements(tensor, dtype)), kind)
    assert isinstance(value, OrtValue)
    assert torch.equal(TORCH_ARRAYS.from_elements(value, kind).to(torch.complex64), tensor.to(torch.complex64))


class OnDevice:
    """The elements of a tensor, as if they were in the memory of a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__dlpack__: Callable[..., Any] = tensor.__dlpack__

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


@pytest.mark.parametrize(("dtype", "number"), [("symint", 3), ("symfloat", 0.1), ("symbool", True)])
@pytest.mark.parametrize("arrays", [NUMPY_ARRAYS, TORCH_ARRAYS, ONNX_RUNTIME_ARRAYS])
def test_numbers_stay_what_they_are(dtype: str, number: float, arrays: ArrayOps) -> None:
    kind = value_type(dtype, ())
    assert to_runtime(number, kind, find_runtime("onnxruntime")) is number
    again = arrays.from_elements(arrays.to_elements(number, dtype), kind)
    assert (type(again), again) == (type(number), number)
    assert to_elements(number, kind).shape == (1,)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2).to_sparse(), r"x: expected a dense tensor with data, found torch\.sparse_coo on cpu"),
        (torch.ones(2, device="meta"), r"x: expected a dense tensor with data, found torch\.strided on meta"),
        (numpy.float32(1), "x: expected a numpy array, or a tensor of a runtime, found numpy.float32"),
        ([1.0, 2.0], "x: expected a numpy array, or a tensor of a runtime, found list"),
    ],
)
def test_what_holds_no_elements_is_refused(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        to_runtime(value, value_type("float32", (2,)), find_runtime("onnxruntime"))


def test_an_array_of_another_dtype_is_refused() -> None:
    for array, found in [(numpy.ones(2), "float64"), (numpy.ones(2, ml_dtypes.bfloat16), "bfloat16")]:
        with pytest.raises(InputError, match=f"x: expected a numpy array of float32, found one of {found}"):
            to_runtime(array, value_type("float32", (2,)), find_runtime("torch"))


def test_each_value_has_the_operations_of_its_runtime() -> None:
    ort_value = OrtValue.ortvalue_from_numpy(numpy.ones(2))
    assert array_ops_of(numpy.ones(2)) is NUMPY_ARRAYS
    assert array_ops_of(torch.ones(2)) is TORCH_ARRAYS
    assert array_ops_of(ort_value) is ONNX_RUNTIME_ARRAYS


class Absent(NumpyRuntime):
    """Needs a package that does not exist."""

    name = "absent"
    packages = ("numpy", "no_such_package")
    install = "pip install no-such-package"


def test_a_missing_package_is_named_with_what_installs_it() -> None:
    register_runtime(Absent())
    try:
        assert find_runtime("absent").title == "numpy"
        message = "the package 'no_such_package' is not installed: pip install no-such-package installs it"
        with pytest.raises(MissingPackageError, match=message):
            import_runtime("absent")
    finally:
        del registry._REGISTRY["absent"]


@pytest.mark.parametrize("dtype", HEADER_DTYPES)
def test_a_file_of_any_dtype_is_read(dtype: str, tmp_path: Path) -> None:
    item_size = HEADER_ITEM_SIZE[HEADER_DTYPES[dtype]]
    entries = {
        "a": {"dtype": HEADER_DTYPES[dtype], "shape": [2, 1], "data_offsets": [0, 2 * item_size]},
        "b": {"dtype": HEADER_DTYPES[dtype], "shape": [0, 3], "data_offsets": [2 * item_size, 2 * item_size]},
    }
    path = tmp_path / "a.safetensors"
    path.write_bytes(weight_file(encode_header(entries), bytes([1] * 2 * item_size)))
    for arrays in (TORCH_ARRAYS.load(path), NUMPY_ARRAYS.load(path)):
        assert {name: tuple(array.shape) for name, array in arrays.items()} == {"a": (2, 1), "b": (0, 3)}
        assert arrays["a"].itemsize == item_size
