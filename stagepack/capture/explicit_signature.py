"""A model whose ``forward`` takes any inputs by name, called by a signature that names them.

``torch.export`` finds no dynamic shapes for what ``**kwargs`` takes, such as all inputs of a model of PEFT.

- Modules of stagepack that call a model: its weights and modules have the names of the model in them, without a prefix.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from stagepack.capture.inputs import Inputs

# No attribute of a model has this name: one of its modules may be called `model`.
_ATTRIBUTE = "(model)"


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


def take_parts(
    wrapper: torch.nn.Module, model: torch.nn.Module, further_modules: Mapping[str, torch.nn.Module] | None = None
) -> None:
    """Give a module that calls a model all parameters, buffers and modules of the model, by their names in the model.

    further_modules: modules of the wrapper, by name. One whose name a part of the model has gets ``_`` at the end of it.
    """
    # The dicts themselves: torch.export replaces parameters in them while it runs the wrapper.
    for attribute in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        wrapper.__dict__[attribute] = model.__dict__[attribute]
    wrapper.__dict__["training"] = model.training
    # The attributes that the model assigns are its own, which `preserve_module` finds here.
    wrapper.__dict__[_ATTRIBUTE] = (model,)
    if further_modules is not None:
        wrapper.__dict__["_modules"] = dict(model.__dict__["_modules"])
        for module_name, module in further_modules.items():
            while hasattr(model, module_name):
                module_name += "_"
            wrapper.__dict__["_modules"][module_name] = module


def wrapped_model(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model that a module calls if `take_parts` made it, else the module itself."""
    while _ATTRIBUTE in vars(module):
        (module,) = vars(module)[_ATTRIBUTE]
    return module
