"""Compare the answers of stages in ONNX Runtime with those in torch, on the values that the example brings to each stage."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stagepack.errors import OperatorError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Value
from stagepack.format.reader import Bundle
from stagepack_loaders.base import PrepareOptions
from stagepack_loaders.comparison import combine_differences, compare_arrays
from stagepack_loaders.example import INPUT_PREFIX
from stagepack_loaders.exchange import to_array, to_runtime
from stagepack_loaders.preparation import prepare_stage
from stagepack_loaders.registry import find_runtime
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


@dataclass(frozen=True, slots=True)
class StageCheck:
    """How far the answer of a stage in ONNX Runtime is from that in torch.

    Attributes:
        difference: the largest absolute difference; None if the answers were not compared.
        within: whether all differences are within the tolerance of `stagepack_loaders.comparison`.
        reason: why the answers were not compared.
    """

    difference: float | None = None
    within: bool = True
    reason: str = ""


def check_stages(bundle: Bundle, allow_ops: Collection[str]) -> Iterator[StageCheck]:
    """Run the example stage by stage in torch, and each stage with an ONNX model in ONNX Runtime too.

    Args:
        bundle: the bundle, with ONNX models.
        allow_ops: namespaces of custom operators that may run.

    Yields:
        The result for each stage, in order.

    Raises:
        OperatorError: an operator is missing here, not allowed, or has another schema.
    """
    values = _example_inputs(bundle)
    for stage_number, entry in enumerate(bundle.stages):
        if values is None:
            yield StageCheck(reason="the bundle has no example")
            continue
        options = PrepareOptions(allow_ops=allow_ops)
        stage = prepare_stage(bundle, stage_number, "cpu", "torch", options).finish(verify=False)
        inputs = [values[edge_name] for edge_name in entry.inputs]
        # The stage may write into its inputs.
        original_inputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = stage.run(inputs)
        values.update(zip(entry.outputs, outputs, strict=True))
        if entry.onnx is None:
            yield StageCheck()
        else:
            yield _check_stage(bundle, stage_number, stage, original_inputs, [*outputs, *inputs])


def _example_inputs(bundle: Bundle) -> dict[str, Any] | None:
    """The inputs of the example by edge name; None if there is no example."""
    if bundle.example is None:
        return None
    tensors = TORCH_ARRAYS.load(bundle.example)
    inputs = {edge: tensors[INPUT_PREFIX + edge.name].clone() for edge in bundle.edges if edge.producer is None}
    return {edge.name: tensor.item() if edge.dtype in SCALAR_DTYPES else tensor for edge, tensor in inputs.items()}


def _check_stage(
    bundle: Bundle, stage_number: int, torch_stage: Any, inputs: list[Any], torch_values: list[Any]
) -> StageCheck:
    """Run a stage in ONNX Runtime.

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
    edge_names = [*entry.outputs, *entry.inputs]
    pairs = [
        (to_array(onnx_value, edges[edge_name], TORCH_ARRAYS), torch_value)
        for edge_name, onnx_value, torch_value in zip(edge_names, [*outputs, *arguments], torch_values, strict=True)
    ]
    pairs += _state_pairs(torch_stage, onnx_stage)
    differences = (
        compare_arrays(TORCH_ARRAYS, TORCH_ARRAYS.array(onnx_value), TORCH_ARRAYS.array(torch_value))
        for onnx_value, torch_value in pairs
    )
    return StageCheck(*combine_differences(differences))


def _state_pairs(torch_stage: Any, onnx_stage: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield the state of a stage after the call, in ONNX Runtime and in torch."""
    tensors = dict(torch_stage.named_parameters(remove_duplicate=False))
    tensors |= torch_stage.named_buffers(remove_duplicate=False)
    for weight_name, onnx_value in onnx_stage.state.items():
        tensor = tensors[weight_name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        value = Value(name=weight_name, dtype=dtype, shape=tuple(tensor.shape))
        yield to_array(onnx_value, value, TORCH_ARRAYS), tensor
