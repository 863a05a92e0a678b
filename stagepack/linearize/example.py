"""Record what the original model answers to its example, for a self-check anywhere."""

from collections.abc import Iterable

import torch

from stagepack.capture.model_run import run_model
from stagepack.capture.programs import Capture
from stagepack.errors import CaptureError, InputError
from stagepack.format.contract import bind_call
from stagepack.format.signature import Signature
from stagepack.format.tree import ValueLeaf, flatten_tree
from stagepack.format.weights import TensorSpec
from stagepack.format.writer import TensorSource
from stagepack.linearize.tensors import tensor_bytes

EXAMPLE_SEED = 0  # random models are asked under this seed, here and in every self-check


def record_example(capture: Capture, signature: Signature, written: Iterable[torch.Tensor]) -> TensorSource:
    """Ask the original model once: its example as tensors ``input.NAME``, its answer as ``output.NUMBER``.

    Numbers are stored as 0-dimensional tensors. The model, with the tensors `written` that it writes, and the inputs stay as they are.

    Raises:
        CaptureError: the model's answer is built of other containers than the captured program's.
    """
    bound = bind_call(signature, capture.inputs.args, capture.inputs.kwargs)
    tensors = {f"input.{name}": torch.as_tensor(given.value).detach().clone() for name, given in bound.items()}
    model = capture.program.module() if capture.model is None else capture.model
    answer = run_model(model, capture.inputs, seed=EXAMPLE_SEED, written=written)
    try:
        results = list(flatten_tree(signature.result, answer, "the answer"))
    except InputError as error:
        message = f"the model does not answer as the captured program does: {error}"
        raise CaptureError(f"{message}: fix what the model returns, for example by use_cache=False") from error
    for number, (_, leaf, result) in enumerate(results):
        if isinstance(leaf, ValueLeaf):
            tensors[f"output.{number}"] = torch.as_tensor(result).detach()
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in kept.items()
    }
    return TensorSource(specs=specs, read=lambda name: [tensor_bytes(kept[name])])
