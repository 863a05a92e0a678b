"""The agreement of weight files, ONNX files and examples with the manifest and the graphs (SPEC W7 to W10, O3 to O5, M16)."""

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from stagepack.errors import Problem
from stagepack.format.dtypes import HEADER_DTYPES, ITEM_SIZE, SCALAR_DTYPES, STORED_AS_BYTES, stored_shape
from stagepack.format.graph import Value, Weight
from stagepack.format.manifest import Edge, EntryPoint, Stage
from stagepack.format.onnx import (
    COMPLEX_PART_DTYPES,
    NEXT_STATE_PREFIX,
    STATE_PREFIX,
    WRITTEN_PREFIX,
    OnnxModel,
    OnnxTensor,
    OnnxValue,
    onnx_element_type,
)
from stagepack.format.rules import INDEX_NAME, BrokenRule, format_names, parse_json
from stagepack.format.shapes import format_dim, known_size
from stagepack.format.tree import ValueLeaf, leaves_of_tree
from stagepack.format.weights import StoredTensor

# How the names in the file of an example begin.
INPUT_PREFIX, OUTPUT_PREFIX = "input.", "output."


class NamedWeights:
    """The weights of the stages that were checked so far, by their names."""

    def __init__(self) -> None:
        self._weights: dict[str, tuple[Weight, str | None]] = {}

    def differing_name(self, weight: Weight, file_name: str | None) -> str | None:
        """Add a weight; return a name that another weight of an earlier stage has, or the same one in another file.

        file_name: the weight file that holds it; None for zeros.
        """
        stored_weight = (replace(weight, value=""), file_name)
        differing = (
            weight_name
            for weight_name in weight.names
            if self._weights.setdefault(weight_name, stored_weight) != stored_weight
        )
        return next(differing, None)

    def checkpoint(self) -> dict[str, str]:
        """Return the file of each stored tensor that a checkpoint of the model has (W10)."""
        return {
            weight.stored: file_name
            for weight, file_name in self._weights.values()
            if file_name is not None and weight.base is None and weight.kind in ("parameter", "buffer")
        }


def check_weights(
    weights: Sequence[Weight],
    headers: Iterable[tuple[str, Mapping[str, StoredTensor]]],
    stage: Stage,
    named_weights: NamedWeights,
) -> Iterator[Problem]:
    """Yield the problems of the weights of a stage (W7 to W9).

    They are tensors that two files hold, weights that do not fit their stored tensor, or have the name of another one; and other bytes, or
    files that the stage does not need, in the manifest.
    """
    for rule, location, message in _weight_differences(weights, headers, stage, named_weights):
        yield Problem(rule=rule, where=location, message=message)


def _weight_differences(
    weights: Sequence[Weight],
    headers: Iterable[tuple[str, Mapping[str, StoredTensor]]],
    stage: Stage,
    named_weights: NamedWeights,
) -> list[BrokenRule]:
    stored: dict[str, StoredTensor] = {}
    files: dict[str, str] = {}
    broken_rules: list[BrokenRule] = []
    for file_name, tensors in headers:
        twice = sorted(stored.keys() & tensors.keys())
        broken_rules += [("W7", file_name, f"{tensor_name[:80]!r} is in another file too") for tensor_name in twice]
        stored.update(tensors)
        files.update(dict.fromkeys(tensors, file_name))
    for weight in weights:
        if (message := _mismatch(weight, stored.get(weight.stored))) is not None:
            broken_rules.append(("W7", stage.graph, message))
        if (differing_name := named_weights.differing_name(weight, files.get(weight.stored))) is not None:
            message = f"the weight {differing_name[:80]!r} differs from the one of this name in another stage, or is in another file"
            broken_rules.append(("W8", stage.graph, message))
    # What is wrong with a weight makes the sums wrong too.
    return broken_rules or [("W9", stage.graph, message) for message in _wrong_sums(weights, stored, files, stage)]


def _mismatch(weight: Weight, tensor: StoredTensor | None) -> str | None:
    """The disagreement of a weight with the stored tensor of its name (None: no file has it), or None if they agree."""
    weight_name = weight.names[0][:80]
    if weight.zeros:
        return None if tensor is None else f"the weight {weight_name!r} is all zeros, but a weight file holds it"
    if tensor is None:
        return f"the weight {weight_name!r} is in none of the stage's weight files"
    if weight.base is None:
        if (tensor.dtype, tensor.shape) == (HEADER_DTYPES[weight.dtype], stored_shape(weight.dtype, weight.shape)):
            return None
        shapes = f"{list(weight.shape)}, its file has {tensor.dtype} {list(tensor.shape)}"
        return f"the weight {weight_name!r} is {weight.dtype} {shapes}"
    strides = weight.strides or ()
    last_element = weight.offset + sum((size - 1) * stride for size, stride in zip(weight.shape, strides, strict=True))
    needed_bytes = 0 if 0 in weight.shape else (last_element + 1) * ITEM_SIZE[weight.dtype]
    if needed_bytes > tensor.end - tensor.start:
        return f"the view {weight_name!r} ends past the last byte of {weight.base[:80]!r}"
    return None


def weight_bytes(weights: Iterable[Weight], stored: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Return the bytes of the stored tensor of each weight, by the name of the stored tensor; weights of zeros count too."""
    bytes_of_stored: dict[str, int] = {}
    for weight in weights:
        if weight.zeros:
            bytes_of_stored[weight.stored] = weight.zero_bytes
        elif (tensor := stored.get(weight.stored)) is not None:
            bytes_of_stored[weight.stored] = tensor.end - tensor.start
    return bytes_of_stored


def _wrong_sums(
    weights: Iterable[Weight], stored: Mapping[str, StoredTensor], files: Mapping[str, str], stage: Stage
) -> Iterator[str]:
    """Yield what the manifest states of the weights of a stage that these are not."""
    bytes_of_stored = weight_bytes(weights, stored)
    if (byte_count := sum(bytes_of_stored.values())) != stage.weight_bytes:
        yield f"the manifest counts {stage.weight_bytes} bytes of weights, the graph has {byte_count}"
    needed_files = {files[tensor_name] for tensor_name in bytes_of_stored if tensor_name in files}
    if unneeded := [file_name for file_name in stage.weights if file_name not in needed_files]:
        yield f"the manifest lists the weight files {format_names(unneeded)}, which have no weight of the graph"


def check_index(content: bytes, named_weights: NamedWeights) -> Iterator[Problem]:
    """Yield where the index of the bundle as a sharded checkpoint says other than the stages (W10)."""
    fields = parse_json(content, INDEX_NAME)
    stated = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(stated, dict):
        yield Problem(rule="W10", where=INDEX_NAME, message="expected an object with a weight_map")
        return
    files = named_weights.checkpoint()
    if differing := sorted(key for key in {*stated, *files} if stated.get(key) != files.get(key)):
        message = f"the weight_map has other files than the stages, or none, for {format_names(differing)}"
        yield Problem(rule="W10", where=INDEX_NAME, message=message)


def example_edges(entry_point: EntryPoint) -> dict[str, Edge]:
    """Return the inputs and the results of an entry point, by the names of their tensors in the file of its example."""
    edges = {edge.name: edge for edge in entry_point.edges}
    leaves = enumerate(leaves_of_tree(entry_point.signature.result))
    inputs = {INPUT_PREFIX + edge.name: edge for edge in entry_point.inputs}
    return inputs | {
        f"{OUTPUT_PREFIX}{index}": edges[leaf.name] for index, leaf in leaves if isinstance(leaf, ValueLeaf)
    }


def check_example(entry_point: EntryPoint, tensors: Mapping[str, StoredTensor]) -> Iterator[Problem]:
    """Yield the problems of the tensors of an example (M16)."""
    for message in _example_differences(entry_point, tensors):
        yield Problem(rule="M16", where=str(entry_point.example), message=message)


def _example_differences(entry_point: EntryPoint, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    edges = example_edges(entry_point)
    if differing := sorted(edges.keys() ^ tensors.keys()):
        yield f"expected a tensor for each input and each result, found {format_names(differing)} missing or too many"
    sizes = {symbol.name: symbol.example for symbol in entry_point.symbols if symbol.example is not None}
    for tensor_name in sorted(edges.keys() & tensors.keys()):
        tensor = tensors[tensor_name]
        if not _is_stored_value(tensor, edges[tensor_name], sizes):
            expected = f"expected {tensor_name[:80]!r} with the dtype of its edge and the sizes of the example"
            yield f"{expected}, found {tensor.dtype} {list(tensor.shape)}"


def _is_stored_value(tensor: StoredTensor, value: Value, sizes: Mapping[str, int]) -> bool:
    if value.dtype in SCALAR_DTYPES:
        return tensor.shape == ()
    item_size = ITEM_SIZE.get(value.dtype, 1) if value.dtype in STORED_AS_BYTES else 1
    if tensor.dtype != HEADER_DTYPES.get(value.dtype) or len(tensor.shape) != max(len(value.shape), item_size > 1):
        return False
    shape: list[int] = []
    for dim, actual_size in zip(value.shape, tensor.shape, strict=False):
        size = known_size(dim, sizes)
        if size is None:  # the last size of what is stored as bytes is a number of bytes
            size = actual_size // item_size if len(shape) == len(value.shape) - 1 else actual_size
        shape.append(size)
    return tensor.shape == stored_shape(value.dtype, tuple(shape))


def check_onnx(
    model: OnnxModel,
    stage: Stage,
    values: Mapping[str, Value | Weight],
    tensors_of_file: Mapping[str, Mapping[str, StoredTensor]],
    file_name: str,
) -> Iterator[Problem]:
    """Yield the problems of the ONNX file of a stage.

    values: the edges by name; and the weights that calls write, by their names with the prefixes ``state.`` and ``next.``.
    tensors_of_file: the tensors of each weight file that the ONNX file may refer to, by file name; those of a file by their names, in the
        order of the file.
    """
    for message in _boundary_differences(model, stage, values):
        yield Problem(rule="O3", where=file_name, message=message)
    stored_tensors = {location: list(tensors.values()) for location, tensors in tensors_of_file.items()}
    for tensor in model.tensors:
        if not _is_inside_one(tensor, stored_tensors.get(tensor.location, ())):
            message = (
                f"expected {tensor.name[:80]!r} inside one tensor of the stage's weight files, "
                f"found bytes {tensor.offset} to {tensor.offset + tensor.length} of {tensor.location[:80]!r}"
            )
            yield Problem(rule="O4", where=file_name, message=message)
    for domain, operator_name in sorted(model.operators):
        if domain not in ("", "ai.onnx"):
            message = f"expected operators of ONNX, found {operator_name[:80]!r} of the domain {domain[:80]!r}"
            yield Problem(rule="O5", where=file_name, message=message)


def _is_inside_one(tensor: OnnxTensor, stored_tensors: Sequence[StoredTensor]) -> bool:
    """Whether the bytes of a tensor are a part of one of the stored tensors, which are in the order of their file."""
    index = bisect.bisect_right(stored_tensors, tensor.offset, key=lambda stored: stored.start) - 1
    return index >= 0 and tensor.offset + tensor.length <= stored_tensors[index].end


def _boundary_differences(model: OnnxModel, stage: Stage, values: Mapping[str, Value | Weight]) -> Iterator[str]:
    expected_inputs = [*stage.inputs, *(STATE_PREFIX + weight_name for weight_name in stage.state)]
    required_outputs = [*stage.outputs, *(NEXT_STATE_PREFIX + weight_name for weight_name in stage.state)]
    inputs, outputs = [value.name for value in model.inputs], [value.name for value in model.outputs]
    if inputs != expected_inputs:
        yield f"expected the inputs {format_names(expected_inputs)}, found {format_names(inputs)}"
    further_outputs = outputs[len(required_outputs) :]
    allowed = {WRITTEN_PREFIX + input_name for input_name in stage.inputs}.issuperset(further_outputs)
    if outputs[: len(required_outputs)] != required_outputs or len(set(outputs)) < len(outputs) or not allowed:
        yield f"expected the outputs {format_names(required_outputs)}, found {format_names(outputs)}"
    for value in (*model.inputs, *model.outputs):
        expected = values.get(value.name.removeprefix(WRITTEN_PREFIX))
        if expected is not None and not _is_onnx_value(value, expected):
            yield f"{value.name[:80]!r} has another type or shape than its edge or weight"


def _is_onnx_value(value: OnnxValue, expected: Value | Weight) -> bool:
    shape = tuple(dim if isinstance(dim, int) else format_dim(dim) for dim in expected.shape)
    if expected.dtype in COMPLEX_PART_DTYPES:
        shape = (*shape, 2)
    return value.element_type == onnx_element_type(expected.dtype) and value.shape == shape
