"""Record the answer of the original model to its example, for a self-check anywhere."""

from collections.abc import Iterable
from typing import Any

import torch

from stagepack.capture.model_run import run_model
from stagepack.capture.programs import Capture
from stagepack.errors import CaptureError, InputError
from stagepack.format.contract import bind_call
from stagepack.format.signature import Signature
from stagepack.format.tree import ValueLeaf, flatten_tree
from stagepack.format.weights import TensorSpec
from stagepack.format.writer import TensorSource
from stagepack.linearize.tensor_memory import dtype_name, tensor_bytes

# Random models run under this seed, here and in every self-check.
EXAMPLE_SEED = 0


def run_example(capture: Capture, written: Iterable[torch.Tensor] = ()) -> Any:
    """Run the original model once on its example.

    Args:
        capture: the captured model. The model and its inputs stay as they are.
        written: the tensors of the model that it writes.

    Raises:
        CaptureError: the model fails.
    """
    model = capture.program.module() if capture.model is None else capture.model
    return run_model(model, capture.inputs, seed=EXAMPLE_SEED, written=written)


def example_tensors(capture: Capture, signature: Signature, answer: Any) -> TensorSource:
    """Return the inputs of the example and the answer of the model as tensors.

    Args:
        capture: the captured model.
        signature: how the model is called.
        answer: the answer, from `run_example`.

    Returns:
        The inputs as ``input.NAME`` and the leaves of the answer as ``output.INDEX``; numbers are 0-dimensional tensors.

    Raises:
        CaptureError: the model's answer consists of other containers than the captured program's.
    """
    inputs = bind_call(signature, capture.inputs.args, capture.inputs.kwargs)
    tensors = {
        f"input.{tensor_name}": torch.as_tensor(bound.value).detach().clone() for tensor_name, bound in inputs.items()
    }
    try:
        results = list(flatten_tree(signature.result, answer, "the answer"))
    except InputError as error:
        message = f"the model does not answer as the captured program does: {error}"
        raise CaptureError(f"{message}: fix what the model returns, for example by use_cache=False") from error
    for result_index, (_, leaf, result) in enumerate(results):
        if isinstance(leaf, ValueLeaf):
            tensors[f"output.{result_index}"] = torch.as_tensor(result).detach()
    contiguous = {tensor_name: tensor.contiguous() for tensor_name, tensor in tensors.items()}
    specs = {
        tensor_name: TensorSpec(name=tensor_name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
        for tensor_name, tensor in contiguous.items()
    }
    return TensorSource(specs=specs, read=lambda tensor_name: [tensor_bytes(contiguous[tensor_name])])
