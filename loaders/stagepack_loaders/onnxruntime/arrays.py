"""Array operations for ONNX Runtime: on numpy arrays, which callers use, and on the values that stages hand on."""

from typing import Any, Final

from onnxruntime import OrtValue

from stagepack.format.graph import Value
from stagepack.format.manifest import Edge
from stagepack_loaders.elements import Array
from stagepack_loaders.numpy_arrays import NumpyArrays
from stagepack_loaders.onnxruntime.values import (
    is_on_host,
    to_numpy,
)

_DLPACK_CPU: Final = 1  # kDLCPU of https://dmlc.github.io/dlpack/latest/c_api.html


class OnnxRuntimeArrays(NumpyArrays):
    """The operations of `stagepack_loaders.base.ArrayOps` on numpy arrays and values of ONNX Runtime."""

    def on_host(self, value: Any) -> bool:
        """See `ArrayOps`."""
        return not isinstance(value, OrtValue) or is_on_host(value)

    def to_elements(self, value: Any, dtype: str) -> Array:
        """See `ArrayOps`."""
        return super().to_elements(to_numpy(value, dtype) if isinstance(value, OrtValue) else value, dtype)

    def device_elements(self, value: Any, dtype: str) -> Any:
        """See `ArrayOps`. Complex numbers are pairs in ONNX Runtime too; booleans leave it as bytes."""
        if self.on_host(value) or dtype.startswith("float8"):  # which its DLPack lacks
            return super().device_elements(value, dtype)
        return value

    def takes_device_memory(self, dtype: str) -> bool:
        """See `ArrayOps`. The DLPack of ONNX Runtime has no booleans and no 8-bit floats."""
        return dtype != "bool" and not dtype.startswith("float8")

    def from_elements(self, elements: Any, value_type: Value | Edge) -> Any:
        """See `ArrayOps`. Elements on a device become a value of ONNX Runtime, all others a numpy array."""
        if hasattr(elements, "__dlpack_device__") and elements.__dlpack_device__()[0] != _DLPACK_CPU:
            return OrtValue.from_dlpack(elements)
        return super().from_elements(elements, value_type)


ONNX_RUNTIME_ARRAYS: Final = OnnxRuntimeArrays()
