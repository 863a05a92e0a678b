"""A model whose ``forward`` takes any inputs by name, called by a signature that names them.

``torch.export`` finds no dynamic shapes for what ``**kwargs`` takes, such as all inputs of a model of PEFT.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from stagepack.capture.inputs import Inputs


@contextlib.contextmanager
def explicit_signature(model: torch.nn.Module, inputs: Inputs) -> Iterator[None]:
    """Give a model, within the ``with`` block, a ``forward`` that names all inputs; one that names them already is left as it is."""
    forward = model.forward
    signature = inspect.signature(forward)
    named = _named_parameters(signature, inputs)
    if named is None:
        yield
        return

    @functools.wraps(forward)
    def call_forward(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    call_forward.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    is_own = "forward" in vars(model)
    model.forward = call_forward
    try:
        yield
    finally:
        del model.forward
        if is_own:
            model.forward = forward


def _named_parameters(signature: inspect.Signature, inputs: Inputs) -> list[inspect.Parameter] | None:
    """The parameters with a name for each input that ``**kwargs`` takes; None if it takes none."""
    further_names = [name for name in inputs.kwargs if name not in signature.parameters]
    parameters = list(signature.parameters.values())
    if not further_names or not parameters or parameters[-1].kind != inspect.Parameter.VAR_KEYWORD:
        return None
    return [*parameters[:-1], *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in further_names)]
