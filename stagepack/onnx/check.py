"""Compare the answers of stages in ONNX Runtime with those in torch, on the values that the example brings to each stage."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stagepack.errors import OperatorError
from stagepack.format.graph import Value
from stagepack.format.reader import Bundle
from stagepack.onnx.float64_answers import float64_answers, rounding_error
from stagepack_loaders.base import PrepareOptions
from stagepack_loaders.comparison import TOLERANCE, Tolerance, compare_arrays
from stagepack_loaders.example import read_example_inputs
from stagepack_loaders.exchange import to_array, to_runtime
from stagepack_loaders.preparation import prepare_stage
from stagepack_loaders.registry import find_runtime
from stagepack_loaders.stage_errors import typed_stage_errors
from stagepack_loaders.torch.arrays import TORCH_ARRAYS

_RANDOM_OPERATORS = {
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}
_MAX_REASON_LENGTH = 300
# How many times the rounding error of torch the answer of ONNX Runtime may be from that of torch.
_ROUNDING_ERRORS = 8


@dataclass(frozen=True, slots=True)
class StageCheck:
    """How far the answer of a stage in ONNX Runtime is from that in torch.

    Attributes:
        difference: the largest absolute difference; None if the answers were not compared.
        rounding: the largest difference of the answer in torch from that in float64, of the outputs for which it decided; None if
            it was not needed.
        within: whether all differences are allowed.
        reason: why the answers were not compared, or which difference is not allowed.
    """

    difference: float | None = None
    rounding: float | None = None
    within: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Answer:
    """A tensor that a stage returns or writes, in ONNX Runtime and in torch.

    Attributes:
        title: what it is, for messages.
        edge_name: the edge of an output; None of what is written.
    """

    title: str
    onnx_value: torch.Tensor
    torch_value: torch.Tensor
    edge_name: str | None = None


def check_stages(
    bundle: Bundle, allow_ops: Collection[str], tolerance: Tolerance | None = None
) -> Iterator[StageCheck]:
    """Run the example stage by stage in torch, and each stage with an ONNX model in ONNX Runtime too.

    A difference is allowed within the tolerance of `stagepack_loaders.comparison`. An output beyond it is allowed too if the largest
    difference is at most 8 times that of torch's own answer from the stage in float64, and at most the relative tolerance of the
    largest value.

    Args:
        bundle: the bundle, with ONNX models.
        allow_ops: as for `stagepack.load`.
        tolerance: the only tolerance, in the place of all that.

    Yields:
        The result for each stage, in order.

    Raises:
        OperatorError: an operator is missing here, not allowed, or has another schema.
        InputError: the example does not fit the bundle.
        StageFailedError: a stage fails on the example in torch.
    """
    values = None if bundle.example is None else read_example_inputs(bundle, TORCH_ARRAYS)
    for stage_number, entry in enumerate(bundle.stages):
        if values is None:
            yield StageCheck(reason="the bundle has no example")
            continue
        options = PrepareOptions(allow_ops=allow_ops)
        stage = prepare_stage(bundle, stage_number, "cpu", "torch", options).finish(verify=False)
        inputs = [values[edge_name] for edge_name in entry.inputs]
        # The stage may write into its inputs.
        original_inputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
        with torch.no_grad(), torch.random.fork_rng(devices=[]), typed_stage_errors(stage_number):
            outputs = stage.run(inputs)
        values.update(zip(entry.outputs, outputs, strict=True))
        if entry.onnx is None:
            yield StageCheck()
        else:
            answers = _answers(bundle, stage_number, stage, original_inputs, [*outputs, *inputs])
            yield (
                answers
                if isinstance(answers, StageCheck)
                else _compare(
                    answers, tolerance, partial(float64_answers, bundle, stage_number, original_inputs, allow_ops)
                )
            )


def _answers(
    bundle: Bundle, stage_number: int, torch_stage: Any, inputs: list[Any], torch_values: list[Any]
) -> list[_Answer] | StageCheck:
    """Run a stage in ONNX Runtime; return its answers, or why there are none.

    `torch_values` are the outputs of the stage in torch, followed by its inputs after the call, which it may have written.
    """
    entry = bundle.stages[stage_number]
    if any(operator_type in _RANDOM_OPERATORS for _, operator_type in bundle.onnx_file(stage_number).model.operators):
        return StageCheck(reason="draws random numbers")
    try:
        prepared = prepare_stage(bundle, stage_number, "cpu", "onnxruntime", PrepareOptions())
        onnx_stage: Any = prepared.finish(verify=False)
    except OperatorError as error:
        # ONNX Runtime has kernels for some types, such as bfloat16, only on GPUs.
        lacks_kernel = "NOT_IMPLEMENTED" in str(error)
        return StageCheck(within=lacks_kernel, reason=str(error))
    edges = {edge.name: edge for edge in bundle.edges}
    runtime = find_runtime(onnx_stage.runtime)
    arguments = [
        to_runtime(value, edges[edge_name], runtime) for edge_name, value in zip(entry.inputs, inputs, strict=True)
    ]
    try:
        outputs = onnx_stage.run(arguments)
    except Exception as error:  # noqa: BLE001 - the exceptions of onnxruntime have no common base
        message = " ".join(str(error).split())[:_MAX_REASON_LENGTH]
        return StageCheck(within=False, reason=f"it fails in ONNX Runtime: {message}")
    titles = [f"output {edge_name}" for edge_name in entry.outputs]
    titles += [f"input {edge_name} after the call" for edge_name in entry.inputs]
    edge_names = [*entry.outputs, *entry.inputs]
    answers = [
        _Answer(
            title,
            TORCH_ARRAYS.array(to_array(onnx_value, edges[edge_name], TORCH_ARRAYS)),
            TORCH_ARRAYS.array(torch_value),
            edge_name if index < len(entry.outputs) else None,
        )
        for index, (title, edge_name, onnx_value, torch_value) in enumerate(
            zip(titles, edge_names, [*outputs, *arguments], torch_values, strict=True)
        )
    ]
    return answers + list(_written_state(torch_stage, onnx_stage))


def _compare(
    answers: list[_Answer], tolerance: Tolerance | None, compute_exactly: Callable[[], Mapping[str, torch.Tensor]]
) -> StageCheck:
    """Compare the answers of a stage. `compute_exactly` computes those in float64; it is called if some are beyond the tolerance."""
    differences = [compare_arrays(TORCH_ARRAYS, answer.onnx_value, answer.torch_value, tolerance) for answer in answers]
    largest = max((difference.largest for difference in differences), default=0.0)
    beyond = [
        (answer, difference.largest)
        for answer, difference in zip(answers, differences, strict=True)
        if not difference.within
    ]
    exact_answers = compute_exactly() if beyond and tolerance is None else {}
    largest_rounding: float | None = None
    for answer, difference in beyond:
        rounding = (
            None if answer.edge_name is None else rounding_error(exact_answers, answer.edge_name, answer.torch_value)
        )
        if rounding is None or difference > min(_ROUNDING_ERRORS * rounding, _share_of_largest(answer.torch_value)):
            reason = _refusal(answer, difference, rounding, tolerance)
            return StageCheck(largest, rounding, within=False, reason=reason)
        largest_rounding = max(rounding, largest_rounding or 0.0)
    return StageCheck(largest, largest_rounding)


def _share_of_largest(value: torch.Tensor) -> float:
    """The relative tolerance of the largest finite value of a tensor."""
    rtol, _ = Tolerance().of_dtype(str(value.dtype).removeprefix("torch."))
    finite_values = value[value.isfinite()].abs()
    return rtol * float(finite_values.max()) if finite_values.numel() else 0.0


def _refusal(answer: _Answer, difference: float, rounding: float | None, tolerance: Tolerance | None) -> str:
    """Which difference is not allowed, and what would be."""
    dtype = str(answer.torch_value.dtype).removeprefix("torch.")
    message = f"its answer differs by {difference:g} in the {answer.title}"
    if answer.onnx_value.shape != answer.torch_value.shape or answer.onnx_value.dtype != answer.torch_value.dtype:
        actual, expected = (
            f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            for value in (answer.onnx_value, answer.torch_value)
        )
        return f"its answer is {actual} in the {answer.title}, and {expected} in torch"
    if dtype not in TOLERANCE:
        return f"{message}, which must be equal: it is {dtype}"
    rtol, atol = (tolerance or Tolerance()).of_dtype(dtype)
    message = f"{message}, beyond rtol {rtol:g} and atol {atol:g}"
    if tolerance is not None or answer.edge_name is None:
        return message
    if rounding is None:
        return f"{message}; the stage cannot be computed in float64, which would show what {dtype} can give"
    largest = _share_of_largest(answer.torch_value)
    return (
        f"{message}; torch itself differs by {rounding:g} from float64, of which {_ROUNDING_ERRORS} times is allowed, and at most "
        f"{largest:g}, rtol of the largest value"
    )


def _written_state(torch_stage: Any, onnx_stage: Any) -> Iterator[_Answer]:
    """Yield the state of a stage after the call, in ONNX Runtime and in torch."""
    tensors = dict(torch_stage.named_parameters(remove_duplicate=False))
    tensors |= torch_stage.named_buffers(remove_duplicate=False)
    for weight_name, onnx_value in onnx_stage.state.items():
        tensor = tensors[weight_name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        value = Value(name=weight_name, dtype=dtype, shape=tuple(tensor.shape))
        array = TORCH_ARRAYS.array(to_array(onnx_value, value, TORCH_ARRAYS))
        yield _Answer(f"buffer {weight_name} after the call", array, tensor)
