"""Whether stages answer in ONNX Runtime as they do in torch: each is given the values that the example brings to it."""

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

_RANDOM = {
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}


@dataclass(frozen=True, slots=True)
class Checked:
    """How far a stage's answer in ONNX Runtime is from that in torch.

    Attributes:
        difference: the largest absolute difference; None if it could not be told.
        within: whether all of it is within the tolerance of `stagepack_loaders.comparison`.
        reason: why it could not be told.
    """

    difference: float | None = None
    within: bool = True
    reason: str = ""


def check(bundle: Bundle, allow_ops: Collection[str]) -> Iterator[Checked]:
    """Run the example stage by stage in torch, and each stage with an ONNX file in ONNX Runtime too; yield what comes of each stage.

    Raises:
        OperatorError: an operator is missing here, not allowed, or has another schema.
    """
    values = _example(bundle)
    for number, entry in enumerate(bundle.stages):
        if values is None:
            yield Checked(reason="the bundle has no example")
            continue
        stage = prepare_stage(bundle, number, "cpu", "torch", PrepareOptions(allow_ops=allow_ops)).finish(verify=False)
        given = [values[name] for name in entry.inputs]
        copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in given]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = stage.run(given)
        values.update(zip(entry.outputs, outputs, strict=True))
        yield Checked() if entry.onnx is None else _compare(bundle, number, stage, copies, [*outputs, *given])


def _example(bundle: Bundle) -> dict[str, Any] | None:
    """The inputs of the example, by edge name; None if there is none."""
    if bundle.example is None:
        return None
    tensors = TORCH_ARRAYS.load(bundle.example)
    scalars = {edge.name for edge in bundle.edges if edge.dtype in SCALAR_DTYPES}
    names = (edge.name for edge in bundle.edges if edge.producer is None)
    given = {name: tensors[INPUT_PREFIX + name].clone() for name in names}
    return {name: tensor.item() if name in scalars else tensor for name, tensor in given.items()}


def _compare(bundle: Bundle, number: int, stage: Any, given: list[Any], outputs: list[Any]) -> Checked:
    """Run a stage in ONNX Runtime on what it was `given` in torch; `outputs` are what it gave there, and then its inputs after the call."""
    entry = bundle.stages[number]
    if any(name in _RANDOM for _, name in bundle.onnx_file(number).model.operators):
        return Checked(reason="draws random numbers")
    try:
        other: Any = prepare_stage(bundle, number, "cpu", "onnxruntime", PrepareOptions()).finish(verify=False)
    except OperatorError as error:
        no_kernel = "NOT_IMPLEMENTED" in str(error)  # such as those for bfloat16, which GPUs have
        return Checked(within=no_kernel, reason=str(error))
    edges = {edge.name: edge for edge in bundle.edges}
    runtime = find_runtime(other.runtime)
    try:
        found = other.run(
            [to_runtime(value, edges[name], runtime) for name, value in zip(entry.inputs, given, strict=True)]
        )
    except Exception as error:  # noqa: BLE001 - onnxruntime's have no other base
        return Checked(within=False, reason=f"it fails in ONNX Runtime: {' '.join(str(error).split())[:300]}")
    names = [*entry.outputs, *entry.inputs]
    pairs = [
        (to_array(mine, edges[name], TORCH_ARRAYS), wanted)
        for name, mine, wanted in zip(names, [*found, *given], outputs, strict=True)
    ]
    weights = dict(stage.named_parameters(remove_duplicate=False)) | dict(stage.named_buffers(remove_duplicate=False))
    pairs += [
        (to_array(value, _value_type(name, weights[name]), TORCH_ARRAYS), weights[name])
        for name, value in other.state.items()
    ]
    compared = (
        compare_arrays(TORCH_ARRAYS, TORCH_ARRAYS.array(mine), TORCH_ARRAYS.array(wanted)) for mine, wanted in pairs
    )
    return Checked(*combine_differences(compared))


def _value_type(name: str, tensor: torch.Tensor) -> Value:
    return Value(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
