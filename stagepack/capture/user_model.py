"""The model that the user wrote, behind a module of stagepack's that calls it."""

import sys
from collections.abc import Mapping

import torch

# No attribute of a model has this name: one of its modules may be called `model`.
_ATTRIBUTE = "(model)"


def take_parts(
    wrapper: torch.nn.Module, model: torch.nn.Module, further_modules: Mapping[str, torch.nn.Module] | None = None
) -> None:
    """Give a module that calls a model all parameters, buffers and modules of the model, by their names in the model.

    One of the wrapper's `further_modules` whose name a part of the model has gets ``_`` at the end of it.
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


def is_transformers_model(model: object) -> bool:
    """Whether a module is a model of transformers. Imports nothing."""
    # Not by an attribute of the package, which imports the module, and with it torchao where it is installed: 1.6 s.
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)
