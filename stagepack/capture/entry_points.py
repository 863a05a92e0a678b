"""Several functions of one module, such as ``encode`` and ``decode`` -> a captured program of each."""

import contextlib
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import Dim

from stagepack.capture.inputs import Inputs, inputs_by_parameter, with_tensors
from stagepack.capture.model_runs import preserve_module, run_model
from stagepack.capture.programs import Capture, capture_module
from stagepack.capture.torch_messages import advised_capture
from stagepack.capture.transformers.hugging_face import capture_transformers
from stagepack.capture.user_model import is_transformers_model, take_parts
from stagepack.errors import CaptureError, OptionError
from stagepack.format.rules import is_identifier
from stagepack.torch_internals import tree_map, tree_map_tensors


def capture_entry_points(model: torch.nn.Module, inputs: Mapping[str, Inputs]) -> dict[str, Capture]:
    """Capture functions of a module, with the inputs of each by its path; return them by their names, the paths with ``_`` for each dot.

    A path is a method (``"encode"``), a module (``"text_model"``, which is called), or a method of a module (``"vae.decode"``). Weights
    have the names of `model` in all of them.
    """
    if not isinstance(inputs, Mapping):
        raise OptionError(
            f"entry_points: expected a dict of inputs by paths of functions, found {type(inputs).__name__}"
        )
    if not inputs:
        raise OptionError("entry_points: expected the inputs of at least one function, found none")
    functions = function_modules(model, inputs)
    with advised_capture():
        return {
            name: _capture_function(_find_function(model, path), path, module, example)
            for name, (path, module, example) in functions.items()
        }


def pipeline_module(pipeline: object) -> torch.nn.Module | None:
    """Return the models of a pipeline of diffusers as one module, which has each under its name; None for another object or a module."""
    components = None if isinstance(pipeline, torch.nn.Module) else getattr(pipeline, "components", None)
    parts = components.items() if isinstance(components, Mapping) else ()
    modules = {name: component for name, component in parts if isinstance(component, torch.nn.Module)}
    return torch.nn.ModuleDict(modules) if modules else None


def function_modules(
    model: torch.nn.Module, inputs: Mapping[str, Inputs]
) -> dict[str, tuple[str, torch.nn.Module, Inputs]]:
    """Return for each entry point its path, a module that calls this function of a model, and its example inputs."""
    functions = {}
    for name, path in _paths_by_name(inputs).items():
        example = inputs[path]
        if not isinstance(example, Inputs):
            raise OptionError(f"entry_points: expected stagepack.Inputs for {path!r}, found {type(example).__name__}")
        functions[name] = (path, _module_of(model, _find_function(model, path)), example)
    return functions


def capture_modules(model: torch.nn.Module, inputs: Inputs, paths: Sequence[str]) -> dict[str, Capture]:
    """Capture modules of a model, with the inputs that each gets in its first call when the model runs its example.

    Where the example has dynamic sizes, torch decides which sizes of a module's inputs are dynamic, unless it cannot be captured so.
    """
    if isinstance(paths, str):
        raise OptionError(f"modules: expected a list of paths, found {paths!r}")
    modules = {path: module for path, module in model.named_modules() if path}
    for path in paths:
        if path not in modules:
            close_paths = difflib.get_close_matches(str(path), modules) or [name for name, _ in model.named_children()]
            raise OptionError(
                f"modules: expected the path of a module, found {path!r}: there are {', '.join(close_paths) or 'none'}"
            )
    calls = record_module_inputs(model, with_tensors(inputs))
    for path in paths:
        if path not in calls:
            called = ", ".join(name for name, _ in model.named_children() if name in calls)
            raise CaptureError(
                f"{path}: the model does not call this module when it runs its example; it calls {called or 'none'}"
            )
    inputs_of_path = {path: calls[path] for path in paths}
    if inputs.dynamic_shapes is not None:
        automatic = {
            path: replace(call, dynamic_shapes=automatic_shapes(modules[path].forward, call))
            for path, call in inputs_of_path.items()
        }
        with contextlib.suppress(CaptureError):
            return capture_entry_points(model, automatic)
    return capture_entry_points(model, inputs_of_path)


def _paths_by_name(paths: Iterable[str]) -> dict[str, str]:
    """The paths of functions by the name of the entry point (SPEC M15)."""
    path_of_name: dict[str, str] = {}
    lowercase_names: dict[str, str] = {}
    for path in paths:
        if not isinstance(path, str):
            raise OptionError(f"entry_points: expected paths of functions, found {type(path).__name__}")
        name = path.replace(".", "_")
        if not is_identifier(name):
            raise OptionError(
                f"entry_points: {path!r} gives the name {name!r}, which is no ASCII identifier: add a method of another name that calls it"
            )
        if other_path := lowercase_names.get(name.lower()):
            raise OptionError(
                f"entry_points: {other_path!r} and {path!r} give one name, where case is ignored: add a method of another name that "
                "calls one of them"
            )
        path_of_name[name] = lowercase_names[name.lower()] = path
    return path_of_name


def _capture_function(function: Any, path: str, module: torch.nn.Module, inputs: Inputs) -> Capture:
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", module)
    capture = capture_transformers if is_transformers_model(owner) else capture_module
    try:
        return capture(module, inputs)
    except CaptureError as error:
        raise CaptureError(f"{path}: {error}") from error


def _find_function(model: torch.nn.Module, path: str) -> Callable[..., Any]:
    function: Any = model
    for attribute in path.split("."):
        try:
            function = getattr(function, attribute)
        except AttributeError:
            message = f"entry_points: expected the path of a method or a module, found {path!r}"
            raise OptionError(f"{message}: {type(function).__name__} has no {attribute!r}") from None
    if not callable(function):
        raise OptionError(f"entry_points: {path!r} is not a function: it is a {type(function).__name__}")
    found: Callable[..., Any] = function
    return found


def _module_of(model: torch.nn.Module, function: Callable[..., Any]) -> torch.nn.Module:
    """A module that calls one function of a model when it is called, and has the parameters and modules of the model."""
    forward = function.forward if isinstance(function, torch.nn.Module) else function
    module: torch.nn.Module = type(type(model).__name__, (torch.nn.Module,), {})()
    take_parts(module, model)

    @functools.wraps(forward)
    def call_function(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    module.forward = call_function
    return module


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
            run_model(model, inputs)
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
