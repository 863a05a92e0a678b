"""Replay the recorded example of a bundle, and run a pipeline on the tensors of a file."""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from stagepack.errors import InputError, WriteError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import SCALAR_DTYPES, STORED_AS_BYTES
from stagepack.format.file_writing import write_at
from stagepack.format.manifest import Edge, EntryPoint
from stagepack.format.output_file import output_file
from stagepack.format.reader import Bundle
from stagepack.format.rules import PADDING_PREFIX
from stagepack.format.tree import ValueLeaf, fill_tree, flatten_tree
from stagepack.format.validate.files import INPUT_PREFIX, OUTPUT_PREFIX, example_edges
from stagepack_loaders.adapter_calls import AdapterCalls
from stagepack_loaders.base import ArrayOps
from stagepack_loaders.comparison import Difference, Tolerance, combine_differences, compare_arrays
from stagepack_loaders.elements import ELEMENT_DTYPES
from stagepack_loaders.pipeline import CallablePipeline


def replay_example(pipeline: CallablePipeline, tolerance: Tolerance | None = None) -> Difference:
    """Run the recorded example, and compare the results with the recorded ones."""
    inputs, expected_results = read_example(pipeline)
    return compare_results(pipeline, run_on_inputs(pipeline, inputs), expected_results, tolerance)


def read_example(pipeline: CallablePipeline, bundle: Bundle | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the recorded example, and seed the random generators as they were when it was recorded.

    bundle: whose example it is, if another bundle of the model has it.
    """
    bundle = bundle or pipeline.bundle
    inputs, results = _read_example_arrays(bundle, pipeline.arrays)
    pipeline.seed(bundle.entry_point.seed)
    return inputs, results


def read_example_inputs(bundle: Bundle, array_ops: ArrayOps) -> dict[str, Any]:
    """Read the recorded inputs, and check them as a call of a pipeline does."""
    entry_point = bundle.entry_point
    values = _input_values(entry_point, _read_example_arrays(bundle, array_ops)[0])
    bound_values = {edge_name: BoundArgument(edge_name, value) for edge_name, value in values.items()}
    check_values(entry_point.inputs, bound_values, entry_point.symbols, entry_point.guards)
    return values


def _read_example_arrays(bundle: Bundle, array_ops: ArrayOps) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs by edge name and the results by number; see `read_example`."""
    if bundle.example is None:
        raise InputError(f"{bundle.location}: the bundle has no example to run: pass inputs")
    bundle.check_digests([bundle.example.name])
    bundle.read_headers([bundle.example.name])
    with _path_of(bundle, bundle.example) as path:
        arrays = array_ops.load(path)
    inputs = {
        array_name.removeprefix(INPUT_PREFIX): array_ops.copy(array)
        for array_name, array in arrays.items()
        if array_name.startswith(INPUT_PREFIX)
    }
    results = {array_name: array for array_name, array in arrays.items() if array_name.startswith(OUTPUT_PREFIX)}
    return (
        _restore_dtypes(array_ops, inputs, _input_edges(bundle.entry_point)),
        _restore_dtypes(array_ops, results, example_edges(bundle.entry_point)),
    )


@contextlib.contextmanager
def _path_of(bundle: Bundle, path: Path) -> Iterator[Path]:
    """A path that a file of a bundle is read by: of memory if deltas make the file."""
    if bundle.patches is None or bundle.patches.patch_of(path.name) is None:
        yield path
        return
    descriptor = os.memfd_create(path.name)
    try:
        with contextlib.ExitStack() as open_files:
            read = bundle.open_read(open_files, path.name)
            content = memoryview(bytearray(read.entry.size))
            read.fill(0, content)
        write_at(descriptor, content, 0)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def compare_results(
    pipeline: CallablePipeline,
    results: Mapping[str, Any],
    expected_results: Mapping[str, Any],
    tolerance: Tolerance | None = None,
) -> Difference:
    """Compare results with expected ones; both are as `run_on_inputs` returns them."""
    if results.keys() != expected_results.keys():
        return Difference(math.inf, within=False)
    return combine_differences(
        compare_arrays(pipeline.arrays, results[result_name], array, tolerance)
        for result_name, array in expected_results.items()
    )


def run_on_inputs(
    pipeline: CallablePipeline, inputs: Mapping[str, Any], adapters: Sequence[str] | None = None
) -> dict[str, Any]:
    """Call a pipeline.

    adapters: the call has the first one; none without one.
    The result is the results as arrays, by number: ``output.0`` is the first leaf of the result. A number is an array without dimensions.
    """
    entry_point = pipeline.entry_point
    args, kwargs = _call_arguments(entry_point, _input_values(entry_point, inputs))
    if adapters and (keyword := AdapterCalls(pipeline.bundle).keyword) is not None:
        kwargs[keyword] = adapters[0]
    with pipeline.inference():
        result = pipeline(*args, **kwargs)
    result_leaves = enumerate(flatten_tree(entry_point.signature.result, result, "the result"))
    return {
        f"{OUTPUT_PREFIX}{index}": pipeline.arrays.array(value)
        for index, (_, leaf, value) in result_leaves
        if isinstance(leaf, ValueLeaf)
    }


def read_inputs(pipeline: CallablePipeline, path: Path) -> dict[str, Any]:
    """Read the inputs in a safetensors file: tensors by edge name, with or without the prefix ``input.``.

    Outputs and padding are left out, so that the example of a bundle can be read.
    """
    try:
        tensors = pipeline.arrays.load(path)
    except (OSError, SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        reason = "it is a folder" if path.is_dir() else error
        raise InputError(f"{path}: expected a safetensors file with the inputs: {reason}") from None
    inputs = {
        tensor_name.removeprefix(INPUT_PREFIX): pipeline.arrays.copy(tensor)
        for tensor_name, tensor in tensors.items()
        if not tensor_name.startswith((OUTPUT_PREFIX, PADDING_PREFIX))
    }
    return _restore_dtypes(pipeline.arrays, inputs, _input_edges(pipeline.entry_point))


def write_outputs(pipeline: CallablePipeline, results: Mapping[str, Any], path: Path) -> None:
    """Write results of `run_on_inputs` as a safetensors file. A file of that name is replaced."""
    try:
        with output_file(path) as new_file:
            pipeline.arrays.save(results, new_file)
    except SafetensorError as error:
        raise WriteError(f"{path}: could not be written: {error}") from None
    except KeyError as error:
        raise WriteError(f"{path}: could not be written: a safetensors file has no dtype {error}") from None


def _input_edges(entry_point: EntryPoint) -> dict[str, Edge]:
    """The inputs of the model, by edge name."""
    return {edge.name: edge for edge in entry_point.inputs}


def _input_values(entry_point: EntryPoint, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a call by edge name, with numbers in the place of arrays of one element."""
    edges = _input_edges(entry_point)
    if inputs.keys() != edges.keys():
        raise InputError(f"expected the inputs {', '.join(edges) or '(none)'}, found {', '.join(inputs) or '(none)'}")
    values = dict(inputs)
    for edge_name, edge in edges.items():
        if edge.dtype in SCALAR_DTYPES:
            shape = list(inputs[edge_name].shape)
            if math.prod(shape) != 1:
                raise InputError(f"{edge_name}: expected one number, found the shape {shape}")
            values[edge_name] = inputs[edge_name].item()
    return values


def _restore_dtypes(array_ops: ArrayOps, arrays: Mapping[str, Any], edges: Mapping[str, Edge]) -> dict[str, Any]:
    """Return arrays of a safetensors file with those of complex numbers that it stores as bytes."""
    restored = dict(arrays)
    for array_name, edge in edges.items():
        if edge.dtype in STORED_AS_BYTES and array_name in arrays:
            dtype, shape = str(arrays[array_name].dtype).removeprefix("torch."), list(arrays[array_name].shape)
            item_size = STORED_AS_BYTES[edge.dtype]
            if dtype != "uint8" or not shape or shape[-1] % item_size or not (edge.shape or shape == [item_size]):
                expected = f"expected uint8 of {edge.dtype}, {item_size} for each number, in the last dimension"
                raise InputError(f"{array_name}: {expected}, found {dtype}{shape}")
            stored = array_ops.to_elements(arrays[array_name], "uint8")
            elements = stored.view(ELEMENT_DTYPES[edge.dtype]).reshape(*stored.shape[:-1], -1, 2)
            restored[array_name] = array_ops.from_elements(elements, edge)
    return restored


def _call_arguments(entry_point: EntryPoint, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call that passes values by edge name."""
    parameters = entry_point.signature.parameters
    args = tuple(fill_tree(parameter.tree, values) for parameter in parameters if parameter.positional)
    kwargs = {parameter.name: fill_tree(parameter.tree, values) for parameter in parameters if not parameter.positional}
    return args, kwargs
