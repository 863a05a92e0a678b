"""Where the ONNX file of a stage breaks rules (SPEC O3 to O5)."""

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
    stored: Mapping[str, Sequence[StoredTensor]],
    where: str,
) -> Iterator[Problem]:
    """Yield the rules that the ONNX file of a stage breaks.

    Args:
        model: what the file holds.
        stage: what the manifest says of the stage.
        values: the edges by name, and the weights that the stage writes, by their name after ``state.`` and ``next.``.
        stored: the tensors of the files that the ONNX file may refer to, by the name of the file.
        where: the name of the ONNX file.
    """
    for message in _boundary(model, stage, values):
        yield Problem(rule="O3", where=where, message=message)
    for tensor in model.tensors:
        held = stored.get(tensor.location, ())
        place = bisect.bisect_right(held, tensor.offset, key=lambda one: one.start) - 1
        if place < 0 or tensor.offset + tensor.length > held[place].end:
            message = (
                f"{tensor.name[:80]!r} does not lie in one tensor of the stage's weight files: {tensor.location[:80]!r}"
            )
            yield Problem(rule="O4", where=where, message=message)
    for domain, name in sorted(model.operators):
        if domain not in ("", "ai.onnx"):
            message = f"the operator {name[:80]!r} is of the domain {domain[:80]!r}, which is not that of ONNX"
            yield Problem(rule="O5", where=where, message=message)


def _boundary(model: OnnxModel, stage: Stage, values: Mapping[str, Edge | Weight]) -> Iterator[str]:
    """What is wrong with the inputs and outputs."""
    given = [*stage.inputs, *(STATE_PREFIX + name for name in stage.state)]
    made = [*stage.outputs, *(NEXT_STATE_PREFIX + name for name in stage.state)]
    inputs, outputs = [value.name for value in model.inputs], [value.name for value in model.outputs]
    if inputs != given:
        yield f"expected the inputs {format_names(given)}, found {format_names(inputs)}"
    written = {WRITTEN_PREFIX + name for name in stage.inputs}
    if outputs[: len(made)] != made or len(set(outputs)) < len(outputs) or not written.issuperset(outputs[len(made) :]):
        yield f"expected the outputs {format_names(made)}, found {format_names(outputs)}"
    for value in (*model.inputs, *model.outputs):
        expected = values.get(value.name.removeprefix(WRITTEN_PREFIX))
        if expected is not None and not _fits(value, expected):
            yield f"{value.name[:80]!r} has another type or other sizes than what it stands for"


def _fits(value: OnnxValue, expected: Edge | Weight) -> bool:
    pair = (2,) if expected.dtype in COMPLEX_PART_DTYPES else ()
    shape = tuple(dim if isinstance(dim, int) else format_dim(dim) for dim in expected.shape)
    return value.element_type == onnx_element_type(expected.dtype) and value.shape == shape + pair
