"""The inputs that modules of a model get when the model runs its example."""

from collections.abc import Callable
from typing import Any

import torch
from torch.export import Dim

from stagepack.capture.inputs import Inputs, inputs_by_parameter
from stagepack.capture.model_run import run_model
from stagepack.capture.module_state import preserve_module
from stagepack.torch_internals import tree_map, tree_map_tensors


def record_module_inputs(model: torch.nn.Module, inputs: Inputs) -> dict[str, Inputs]:
    """Run a model on its example, and return the inputs of the first call of each module, by its path."""
    calls: dict[str, Inputs] = {}

    def record(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if path not in calls:
            copied_args, copied_kwargs = tree_map_tensors(lambda tensor: tensor.detach().clone(), (args, kwargs))
            calls[path] = Inputs(args=copied_args, kwargs=copied_kwargs)

    with preserve_module(model):
        handles = [
            module.register_forward_pre_hook(
                lambda _, args, kwargs, path=path: record(path, args, kwargs), with_kwargs=True
            )
            for path, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)  # it takes no hooks
        ]
        try:
            run_model(model, inputs, seed=0)
        finally:
            for handle in handles:
                handle.remove()
    return calls


def automatic_shapes(forward: Callable[..., Any], inputs: Inputs) -> dict[str, Any]:
    """Return ``Dim.AUTO`` for all dimensions of all inputs of a module that torch may find dynamic."""

    def automatic_dims(leaf: Any) -> dict[int, Any] | None:
        # torch fixes sizes of 0 and 1 in any case; where the caller asks for them by name, that is worth a warning.
        return (
            {axis: Dim.AUTO for axis, size in enumerate(leaf.shape) if size > 1}
            if isinstance(leaf, torch.Tensor)
            else None
        )

    return {name: tree_map(automatic_dims, value) for name, value in inputs_by_parameter(forward, inputs).items()}
