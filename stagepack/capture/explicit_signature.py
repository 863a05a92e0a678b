"""A model whose ``forward`` takes any arguments, called by a signature that names them.

``torch.export`` finds no dynamic shapes for what ``**kwargs`` takes, such as all inputs of a model of PEFT, and takes those of ``*args``
as one.
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
    """The parameters with a name for each input that ``*args`` and ``**kwargs`` take; None if they take none."""
    parameters = signature.parameters.values()
    further_names = [name for name in inputs.kwargs if name not in signature.parameters]
    try:
        bound = signature.bind_partial(*inputs.args, **inputs.kwargs)
    except TypeError:  # torch says what does not fit
        return None
    named: list[inspect.Parameter] = []
    for parameter in parameters:
        if parameter.kind == parameter.VAR_POSITIONAL:
            count = len(bound.arguments.get(parameter.name, ()))
            # Names by position are behind parameters that may be passed by name; those become parameters by position, too.
            if count:
                named = [before.replace(kind=parameter.POSITIONAL_ONLY, default=parameter.empty) for before in named]
            named += [
                inspect.Parameter(f"{parameter.name}_{index}", parameter.POSITIONAL_ONLY) for index in range(count)
            ]
        elif parameter.kind == parameter.VAR_KEYWORD:
            named += [inspect.Parameter(name, parameter.KEYWORD_ONLY) for name in further_names]
        else:
            named.append(parameter)
    takes_any = {
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    return named if takes_any & bound.arguments.keys() else None
