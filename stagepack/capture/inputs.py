"""Example inputs of a model, and which of their dimensions may change."""

import inspect
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stagepack.errors import CaptureError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Example inputs of a model, and which of their dimensions may change.

    On the command line, the functions that SOURCE and ``--inputs`` name return it.

    Attributes:
        args: the inputs that are passed by position.
        kwargs: the inputs that are passed by name.
        dynamic_shapes: the dimensions that may change, as ``torch.export.export`` takes them, except that parameters, and items of the
            dicts that they take, may be left out: their sizes are fixed to the example. None fixes all sizes.

    Examples:
        >>> batch = torch.export.Dim("batch", min=1, max=64)
        >>> stagepack.Inputs(
        ...     args=(torch.zeros(4, 8),),
        ...     kwargs={"scale": 2.0},
        ...     dynamic_shapes={"x": {0: batch}},
        ... )
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic_shapes: Any = None


def with_tensors(inputs: Inputs) -> Inputs:
    """Return the inputs with a tensor in the place of each numpy array, in whatever containers, and each tensor once."""
    if "numpy" in sys.modules:
        inputs = replace(inputs, args=_map_arrays(inputs.args), kwargs=_map_arrays(dict(inputs.kwargs)))
    return _with_distinct_tensors(inputs)


def on_device_of(model: Any, inputs: Inputs) -> Inputs:
    """Return inputs that are made for a model with their tensors on the device of its first weight."""
    from stagepack.torch_internals import tree_map_tensors  # noqa: PLC0415 - imports torch

    device = device_of(model)
    if device.type in ("cpu", "meta"):
        return inputs
    args, kwargs = tree_map_tensors(lambda tensor: tensor.to(device), (inputs.args, dict(inputs.kwargs)))
    return replace(inputs, args=args, kwargs=kwargs)


def device_of(model: Any) -> Any:
    """Return the device of the first weight of a module; the CPU for a module without weights."""
    import torch  # noqa: PLC0415 - slow to import

    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _with_distinct_tensors(inputs: Inputs) -> Inputs:
    """The inputs with a copy of each tensor that is given a second time: torch.export reads one input in the place of both."""
    import torch  # noqa: PLC0415 - slow to import

    from stagepack.torch_internals import tree_leaves, tree_map  # noqa: PLC0415 - imports torch

    values = (inputs.args, dict(inputs.kwargs))
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    if len(set(map(id, tensors))) == len(tensors):
        return inputs
    seen: set[int] = set()

    def distinct(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) not in seen:
            seen.add(id(leaf))
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    args, kwargs = tree_map(distinct, values)
    return replace(inputs, args=args, kwargs=kwargs)


def _map_arrays(value: Any) -> Any:
    import numpy  # noqa: PLC0415 - only where the caller has imported it
    import torch  # noqa: PLC0415 - slow to import

    if isinstance(value, numpy.ndarray | numpy.generic):
        try:
            return torch.as_tensor(value)
        except TypeError as error:
            raise CaptureError(f"example inputs: an array of {value.dtype} has no tensor: {error}") from None
    if type(value) is dict:
        return {key: _map_arrays(item) for key, item in value.items()}
    return type(value)(map(_map_arrays, value)) if type(value) in (list, tuple) else value


def required_parameters(forward: Callable[..., Any]) -> list[str]:
    """The parameters of a model's ``forward`` that have no default."""
    named_kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    return [
        parameter.name
        for parameter in inspect.signature(forward).parameters.values()
        if parameter.default is parameter.empty and parameter.kind in named_kinds
    ]


def unknown_inputs(forward: Callable[..., Any], inputs: Inputs) -> str | None:
    """Why a model's ``forward`` does not take inputs of these names, or None."""
    parameters = inspect.signature(forward).parameters.values()
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        return None
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL)
    ]
    unknown = [name for name in inputs.kwargs if name not in names]
    return (
        f"forward has no parameter {', '.join(unknown)}: it takes {', '.join(names) or 'none by name'}"
        if unknown
        else None
    )


def inputs_by_parameter(forward: Callable[..., Any], inputs: Inputs) -> dict[str, Any]:
    """The example input of each parameter of a model's ``forward``, in the order of the call."""
    try:
        bound = inspect.signature(forward).bind_partial(*inputs.args)
    except TypeError as error:
        raise CaptureError(f"the example inputs do not fit the model's forward: {error}") from None
    return {**bound.arguments, **inputs.kwargs}


def complete_dynamic_shapes(forward: Callable[..., Any], inputs: Inputs) -> Any:
    """The dynamic shapes as ``torch.export`` requires them: None for parameters left out, a tuple for what ``*args`` takes."""
    shapes = inputs.dynamic_shapes
    if shapes is None:
        return None
    example_of_parameter = inputs_by_parameter(forward, inputs)
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind == parameter.VAR_POSITIONAL and parameter.name in example_of_parameter:
            shapes = _with_tuple_for(parameter.name, shapes, example_of_parameter)
    if isinstance(shapes, list | tuple) and len(shapes) < len(example_of_parameter):
        shapes = (*shapes, *[None] * (len(example_of_parameter) - len(shapes)))
    if isinstance(shapes, list | tuple) and len(shapes) == len(example_of_parameter):
        shapes = type(shapes)(map(complete_spec, example_of_parameter.values(), shapes))
    if isinstance(shapes, Mapping):
        named = {key: complete_spec(value, shapes.get(key)) for key, value in example_of_parameter.items()}
        shapes = {**named, **{key: spec for key, spec in shapes.items() if key not in named}}
    return shapes


def complete_spec(value: Any, spec: Any) -> Any:
    """The dynamic sizes of one input as ``torch.export`` requires them: with None for each item of a container that they leave out."""
    from stagepack.torch_internals import container_items, sizes_of_container  # noqa: PLC0415 - imports torch

    items = container_items(value)
    if items is None:
        return spec
    specs: list[Any]
    if spec is None or spec in ({}, [], ()):
        specs = [None] * len(items)
    elif isinstance(value, Mapping) and isinstance(spec, Mapping) and spec.keys() <= value.keys():
        specs = [spec.get(key) for key in value]
    elif not isinstance(value, Mapping) and isinstance(spec, list | tuple) and len(spec) == len(items):
        specs = list(spec)
    else:
        return spec  # torch says what does not fit
    return sizes_of_container(value, list(map(complete_spec, items, specs)))


def _with_tuple_for(parameter_name: str, shapes: Any, example_of_parameter: Mapping[str, Any]) -> Any:
    """The shapes, with the shapes of what ``*args`` takes in a tuple; unchanged where they have one."""
    examples = example_of_parameter[parameter_name]
    if isinstance(shapes, Mapping):
        unknown_names = [shape_name for shape_name in shapes if shape_name not in example_of_parameter]
        known_shapes = {key: shape for key, shape in shapes.items() if key in example_of_parameter}
        if isinstance(shapes.get(parameter_name), list):
            return {**shapes, parameter_name: tuple(shapes[parameter_name])}
        if len(examples) == len(unknown_names) == 1 and parameter_name not in shapes:
            # The input has this name in the code that `forward` calls.
            return known_shapes | {parameter_name: (shapes[unknown_names[0]],)}
        return shapes
    start = list(example_of_parameter).index(parameter_name)
    is_by_input = isinstance(shapes, list | tuple) and len(shapes) == len(example_of_parameter) - 1 + len(examples)
    if not is_by_input or (len(examples) == 1 and _has_shapes(shapes[start])):
        return shapes
    end = start + len(examples)
    return dict(zip(example_of_parameter, [*shapes[:start], tuple(shapes[start:end]), *shapes[end:]], strict=True))


def _has_shapes(shape: Any) -> bool:
    """Whether this is a sequence of the shapes of inputs, and not the shape of one."""
    return isinstance(shape, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in shape)
