"""The rules on the ONNX file of a stage beyond its form (SPEC O3 to O5)."""

import bisect
from collections.abc import Iterator, Mapping, Sequence

from stagepack.errors import Problem
from stagepack.format.graph import Weight
from stagepack.format.manifest import Edge, Stage
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
from stagepack.format.shapes import format_dim
from stagepack.format.validate.problems import format_names
from stagepack.format.weights import StoredTensor


def check_onnx(
    model: OnnxModel,
    stage: Stage,
    values: Mapping[str, Edge | Weight],
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
    locations = {tensor.location for tensor in model.tensors}
    ordered_tensors = {location: list(tensors_of_file.get(location, {}).values()) for location in locations}
    for tensor in model.tensors:
        if not _is_inside_one(tensor, ordered_tensors[tensor.location]):
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
    """Whether the bytes of a tensor are a part of one of the stored tensors."""
    index = bisect.bisect_right(stored_tensors, tensor.offset, key=lambda stored: stored.start) - 1
    return index >= 0 and tensor.offset + tensor.length <= stored_tensors[index].end


def _boundary_differences(model: OnnxModel, stage: Stage, values: Mapping[str, Edge | Weight]) -> Iterator[str]:
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
        if expected is not None and not _has_type_of(value, expected):
            yield f"{value.name[:80]!r} has another type or shape than its edge or weight"


def _has_type_of(value: OnnxValue, expected: Edge | Weight) -> bool:
    shape = tuple(dim if isinstance(dim, int) else format_dim(dim) for dim in expected.shape)
    if expected.dtype in COMPLEX_PART_DTYPES:
        shape = (*shape, 2)
    return value.element_type == onnx_element_type(expected.dtype) and value.shape == shape
