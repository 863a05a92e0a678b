"""Record what the original model answers to its example, for a self-check anywhere."""

import copy
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stagepack.capture import Capture, unchanged
from stagepack.errors import CaptureError
from stagepack.format.contract import bind
from stagepack.format.manifest import Signature
from stagepack.format.tree import ValueLeaf, tree_leaves
from stagepack.format.weights import TensorSpec
from stagepack.linearize.tensors import to_bytes
from stagepack.pack import Tensors

SEED = 0  # random models are asked under this seed, here and in every self-check


def record_example(capture: Capture, signature: Signature) -> Tensors:
    """Ask the original model once: its example as tensors ``input.NAME``, its answer as ``output.NUMBER``.

    Numbers are stored as 0-dimensional tensors. The model and the inputs stay as they are.

    Raises:
        CaptureError: the model's answer has other leaves than the captured program's.
    """
    bound = bind(signature, capture.inputs.args, capture.inputs.kwargs)
    tensors = {f"input.{name}": torch.as_tensor(given.value).detach().clone() for name, given in bound.items()}
    results = pytree.tree_leaves(_ask(capture))
    expected = list(tree_leaves(signature.result))
    if len(results) != len(expected):
        message = f"the model answers with {len(results)} leaves, the captured program with {len(expected)}"
        raise CaptureError(f"{message}: fix what the model returns, for example by use_cache=False")
    for number, (leaf, result) in enumerate(zip(expected, results, strict=True)):
        if isinstance(leaf, ValueLeaf):
            tensors[f"output.{number}"] = torch.as_tensor(result).detach()
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in kept.items()
    }
    return Tensors(specs=specs, read=lambda name: [to_bytes(kept[name])])


def _ask(capture: Capture) -> Any:
    """The answer of the module, or of the program when there is no module; its state and the inputs are put back."""
    model = capture.model or capture.program.module()
    args, kwargs = copy.deepcopy((tuple(capture.inputs.args), dict(capture.inputs.kwargs)))
    with unchanged(model), torch.no_grad():
        torch.manual_seed(SEED)
        return copy.deepcopy(model(*args, **kwargs))
