"""Interpret the graph of a stage: for a runtime that has a function of numpy arrays for each operator.

`refuse_unsupported` and `run_nodes` belong together: `run_nodes` runs every graph that `refuse_unsupported` does not refuse. Dtypes that
numpy lacks, such as bfloat16, are those of ml_dtypes.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy
from numpy.lib.stride_tricks import as_strided
from safetensors import deserialize
from safetensors.numpy import save_file

from stagepack.errors import InputError, MissingPackageError, OperatorError
from stagepack.format.dtypes import SCALAR_DTYPES, TORCH_DTYPES
from stagepack.format.graph import Argument, Graph, ListArg, Node, Value, ValueArg, Weight
from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack_loaders.base import PrepareOptions
from stagepack_loaders.elements import COMPLEX_DTYPES, ELEMENT_DTYPES, Array
from stagepack_loaders.weight_files import WeightFile, open_weight_files

# Operator name -> its function, a Python function whose parameters have the names and defaults of the schema.
Operators = Mapping[str, Callable[..., Any]]


def numpy_dtype(dtype: str) -> numpy.dtype[Any]:
    """Return the numpy dtype of a torch name, such as ``float32`` or ``bfloat16``."""
    if not is_extension_dtype(dtype):
        return numpy.dtype(dtype)
    try:
        extension_types = importlib.import_module("ml_dtypes")
    except ModuleNotFoundError:
        message = f"numpy has no dtype {dtype}: pip install ml_dtypes installs it"
        raise MissingPackageError(message, name="ml_dtypes") from None
    extension_dtype: numpy.dtype[Any] = numpy.dtype(getattr(extension_types, dtype))
    return extension_dtype


def is_extension_dtype(dtype: str) -> bool:
    """Whether numpy lacks a dtype that ml_dtypes has."""
    return dtype.startswith(("bfloat", "float8"))


class NumpyArrays:
    """The operations of `stagepack_loaders.base.ArrayOps` on numpy arrays. Runtimes that work on these may use it or extend it."""

    def is_array(self, value: object) -> bool:
        """See `ArrayOps`."""
        return isinstance(value, numpy.ndarray)

    def load(self, path: Path) -> dict[str, Array]:
        """See `ArrayOps`."""
        return {
            array_name: numpy.frombuffer(
                header_entry["data"], numpy_dtype(TORCH_DTYPES[header_entry["dtype"]])
            ).reshape(header_entry["shape"])
            for array_name, header_entry in deserialize(path.read_bytes())
        }

    def save(self, arrays: Mapping[str, Array], path: Path) -> None:
        """See `ArrayOps`."""
        save_file(
            {array_name: numpy.ascontiguousarray(array).reshape(array.shape) for array_name, array in arrays.items()},
            path,
        )

    def copy(self, array: Array) -> Array:
        """See `ArrayOps`."""
        return array.copy()

    def array(self, value: object) -> Array:
        """See `ArrayOps`."""
        return numpy.asarray(value)

    def join(self, arrays: Sequence[Array]) -> Array:
        """See `ArrayOps`."""
        return numpy.concatenate(arrays)

    def difference(self, actual: Array, expected: Array, rtol: float, atol: float) -> tuple[float, bool]:
        """See `ArrayOps`."""
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return math.inf, False
        wide_dtype = numpy.complex128 if actual.dtype.kind == "c" else numpy.float64
        with numpy.errstate(invalid="ignore"):
            actual, expected = actual.astype(wide_dtype), expected.astype(wide_dtype)
            are_equal = (actual == expected) | ((actual != actual) & (expected != expected))
            distance = numpy.where(are_equal, 0.0, numpy.abs(actual - expected))
            distance = numpy.where(numpy.isnan(distance), math.inf, distance)
            # An infinity is near nothing but itself, though a part of it is infinite too.
            are_close = are_equal | (numpy.isfinite(distance) & (distance <= atol + rtol * numpy.abs(expected)))
        return float(distance.max(initial=0.0)), bool(are_close.all())

    def on_host(self, _: Any) -> bool:
        """See `ArrayOps`."""
        return True

    def to_elements(self, value: Any, dtype: str) -> Array:
        """See `ArrayOps`."""
        if dtype in SCALAR_DTYPES:
            return numpy.array([value], ELEMENT_DTYPES[dtype])
        if not isinstance(value, numpy.ndarray) or value.dtype.name != dtype:
            actual = f"one of {value.dtype.name}" if isinstance(value, numpy.ndarray) else type(value).__name__
            raise InputError(f"expected a numpy array of {dtype}, found {actual}")
        if dtype in COMPLEX_DTYPES:
            value = as_strided(value, (*value.shape, 1), (*value.strides, value.itemsize))
        return numpy.atleast_1d(value.view(ELEMENT_DTYPES[dtype]))

    def device_elements(self, value: Any, dtype: str) -> Any:
        """See `ArrayOps`."""
        return numpy.ascontiguousarray(self.to_elements(value, dtype))

    def takes_device_memory(self, dtype: str) -> bool:
        """See `ArrayOps`."""
        return False

    def from_elements(self, elements: Any, value_type: Value | Edge) -> Any:
        """See `ArrayOps`."""
        array = elements if isinstance(elements, numpy.ndarray) else numpy.from_dlpack(elements)
        if value_type.dtype in SCALAR_DTYPES:
            return array.item()
        array = array.view(numpy_dtype(value_type.dtype))
        if value_type.dtype in COMPLEX_DTYPES:
            array = array[..., 0]
        return array if value_type.shape else array.reshape(())


NUMPY_ARRAYS: Final = NumpyArrays()


def refuse_unsupported(bundle: Bundle, stage_number: int, graph: Graph, operators: Operators, title: str) -> None:
    """Refuse a stage that `run_nodes` cannot run. A runtime calls it in `prepare`, before weights are read.

    Refused are: operators without a function; arguments that the function does not take; arguments other than values, numbers, strings,
    None and lists of these; operators that return several values; grad modes and autocast; subgraphs; stages that write buffers.
    """
    unknown_operators = sorted({op.name for op in graph.ops} - operators.keys())
    if unknown_operators:
        reason = f"has no {', '.join(unknown_operators)}"
    elif bundle.stages[stage_number].state:
        reason = "does not write buffers"
    elif graph.subgraphs:
        reason = "does not run subgraphs"
    elif graph.contexts:
        reason = "does not run nodes in a grad mode or autocast"
    else:
        reason = next(_unsupported_calls(graph, operators), "")
    if reason:
        raise OperatorError(f"stage {stage_number}: {title} {reason}: choose another runtime")


def _unsupported_calls(graph: Graph, operators: Operators) -> Iterator[str]:
    """Yield why nodes cannot be run."""
    signatures = [inspect.signature(operators[op.name]) for op in graph.ops]
    for node in graph.nodes:
        operator_name = graph.ops[node.op].name
        arguments = [*node.args, *(argument for _, argument in node.kwargs)]
        if node.unpack:
            yield f"does not run {operator_name}, which returns several values"
        for argument in arguments:
            if not _is_supported(argument):
                yield f"does not run {operator_name} with a {type(argument).__name__}"
        try:
            signatures[node.op].bind(*node.args, **dict(node.kwargs))
        except TypeError as error:
            yield f"does not run {operator_name} with these arguments ({error})"


def _is_supported(argument: Argument) -> bool:
    """Whether `_argument_value` knows an argument."""
    if isinstance(argument, ListArg):
        return all(map(_is_supported, argument.items))
    return argument is None or isinstance(argument, ValueArg | bool | int | float | str)


def run_nodes(graph: Graph, operators: Operators, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Run the nodes of a graph in their order.

    The result is the outputs of the graph, in order. Tensors have the dtypes that the graph states.
    """
    known_values = dict(values)
    for node in graph.nodes:
        result = _call(node, operators[graph.ops[node.op].name], known_values)
        for output in node.outputs:
            if output is not None:
                is_scalar = output.dtype in SCALAR_DTYPES
                known_values[output.name] = result if is_scalar else numpy.asarray(result, numpy_dtype(output.dtype))
    return tuple(known_values[output_name] for output_name in graph.outputs)


def _call(node: Node, function: Callable[..., Any], known_values: Mapping[str, Any]) -> Any:
    """Call the function of a node with its positional and keyword arguments."""
    positional = [_argument_value(argument, known_values) for argument in node.args]
    keywords = {parameter_name: _argument_value(argument, known_values) for parameter_name, argument in node.kwargs}
    return function(*positional, **keywords)


def _argument_value(argument: Argument, known_values: Mapping[str, Any]) -> Any:
    """The value of an argument."""
    if isinstance(argument, ValueArg):
        return known_values[argument.name]
    if isinstance(argument, ListArg):
        return [_argument_value(item, known_values) for item in argument.items]
    return argument


def map_stored_tensors(bundle: Bundle, stage_number: int, *, verify: bool) -> dict[str, Array]:
    """Return the bytes of each stored tensor of a stage, by name. They stay when the bundle is replaced, removed or written into."""
    weight_files = open_weight_files(bundle, bundle.stages[stage_number].weights, PrepareOptions(), verify=verify)
    return stored_tensors(weight_files)


def stored_tensors(weight_files: Mapping[str, WeightFile]) -> dict[str, Array]:
    """Return the bytes of each stored tensor of weight files, by name. They cannot be written."""
    stored: dict[str, Array] = {}
    for weight_file in weight_files.values():
        content = numpy.frombuffer(weight_file.content, numpy.uint8)
        content.flags.writeable = False
        stored.update(
            (stored_name, content[entry.start : entry.end]) for stored_name, entry in weight_file.tensors.items()
        )
    return stored


def read_weight(weight: Weight, stored_tensors: Mapping[str, Array]) -> Array:
    """Return a weight as a read-only array on the bytes of its stored tensor, from `map_stored_tensors`."""
    dtype = numpy_dtype(weight.dtype)
    if weight.zeros:
        zeros = numpy.zeros(weight.shape, dtype)
        zeros.flags.writeable = False
        return zeros
    stored_bytes = stored_tensors[weight.stored]
    if weight.base is None:
        return stored_bytes.view(dtype).reshape(weight.shape)
    elements = stored_bytes[: stored_bytes.size - stored_bytes.size % dtype.itemsize].view(dtype)[weight.offset :]
    strides = [stride * dtype.itemsize for stride in weight.strides or ()]
    return as_strided(elements, weight.shape, strides, writeable=False)
