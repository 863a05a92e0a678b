"""How a model or one of its modules is called -> `Signature`."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument

from stagepack.capture.module_calls import TracedCall
from stagepack.format.codec import is_plain
from stagepack.format.manifest import Parameter, Signature
from stagepack.format.tree import Tree
from stagepack.linearize.container_trees import Leaf, container_tree, leaf_tree
from stagepack.torch_internals import TreeSpec, tree_children

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def program_signature(
    program: ExportedProgram, inputs: Sequence[Leaf], results: Sequence[Leaf], forward: Callable[..., Any] | None
) -> Signature:
    """Return the signature of a program: the parameters that the example passes, and those with a plain default.

    forward: the call of the original model, for the order and the defaults of its parameters; None if there is no model.
    """
    leaves = iter(inputs)
    args_spec, kwargs_spec = tree_children(program.call_spec.in_spec)
    args = [container_tree(spec, leaves, "an input") for spec in tree_children(args_spec)]
    kwargs = {
        parameter_name: container_tree(spec, leaves, f"the input {parameter_name}")
        for parameter_name, spec in _named_children(kwargs_spec)
    }
    parameters = _captured_parameters(program, args, kwargs)
    if forward is not None:
        parameters = _declared_parameters(inspect.signature(forward).parameters, args, kwargs)
    result = container_tree(program.call_spec.out_spec, iter(results), "the result")
    return Signature(parameters=tuple(parameters), result=result)


def call_signature(call: TracedCall, arguments: Sequence[Leaf], results: Sequence[Leaf]) -> Signature:
    """Return the signature of a call of a module, with its arguments as they were passed."""
    leaves = iter(arguments)
    args_spec, kwargs_spec = tree_children(call.arguments_spec)
    declared = [parameter for parameter in call.parameters.values() if parameter.kind in _POSITIONAL]
    parameters = []
    for position, spec in enumerate(tree_children(args_spec)):
        parameter = declared[position] if position < len(declared) else None
        parameter_name = f"arg_{position}" if parameter is None else parameter.name
        takes_keyword = parameter is not None and parameter.kind != parameter.POSITIONAL_ONLY
        tree = container_tree(spec, leaves, f"the argument {parameter_name}")
        parameters.append(Parameter(name=parameter_name, tree=tree, positional=True, keyword=takes_keyword))
    for parameter_name, spec in _named_children(kwargs_spec):
        tree = container_tree(spec, leaves, f"the argument {parameter_name}")
        parameters.append(Parameter(name=parameter_name, tree=tree))
    result = container_tree(call.results_spec, iter(results), "the result")
    return Signature(parameters=tuple(parameters), result=result)


def _captured_parameters(
    program: ExportedProgram, args: Sequence[Tree], kwargs: Mapping[str, Tree]
) -> Iterator[Parameter]:
    """Yield the parameters of a program without a model; torch may have recorded the names of its arguments."""
    root_signature = program.module_call_graph[0].signature
    recorded_names = (root_signature.forward_arg_names if root_signature else None) or []
    for position, tree in enumerate(args):
        has_name = len(args) <= len(recorded_names)
        yield Parameter(name=recorded_names[position] if has_name else f"arg{position}", tree=tree, positional=True)
    yield from (Parameter(name=parameter_name, tree=tree) for parameter_name, tree in kwargs.items())


def _declared_parameters(
    declared: Mapping[str, inspect.Parameter], args: Sequence[Tree], kwargs: Mapping[str, Tree]
) -> Iterator[Parameter]:
    """Yield the parameters of a model. Behind one that the example leaves out, no further argument can be passed by position."""
    positional = [parameter for parameter in declared.values() if parameter.kind in _POSITIONAL]
    remaining_kwargs = dict(kwargs)
    keyword_only: list[Parameter] = []
    is_gap_met = False
    for position, parameter in enumerate(positional):
        tree = args[position] if position < len(args) else remaining_kwargs.pop(parameter.name, None)
        tree = _default_tree(parameter) if tree is None else tree
        if tree is None:
            is_gap_met = True
        elif is_gap_met:
            keyword_only.append(Parameter(name=parameter.name, tree=tree))
        else:
            takes_keyword = parameter.kind != parameter.POSITIONAL_ONLY
            yield Parameter(name=parameter.name, tree=tree, positional=True, keyword=takes_keyword)
    variadic_name = next(
        (
            parameter_name
            for parameter_name, parameter in declared.items()
            if parameter.kind == parameter.VAR_POSITIONAL
        ),
        "arg",
    )
    for index, tree in enumerate(args[len(positional) :]):
        yield Parameter(name=f"{variadic_name}_{index}", tree=tree, positional=True, keyword=False)
    yield from keyword_only
    for parameter in declared.values():
        if parameter.kind == parameter.KEYWORD_ONLY:
            tree = remaining_kwargs.pop(parameter.name, None) or _default_tree(parameter)
            if tree is not None:
                yield Parameter(name=parameter.name, tree=tree)
    yield from (Parameter(name=parameter_name, tree=tree) for parameter_name, tree in remaining_kwargs.items())


def _default_tree(parameter: inspect.Parameter) -> Tree | None:
    """The default of a parameter that the example leaves out, if it is plain: passing it changes nothing."""
    if is_plain(parameter.default):
        return leaf_tree(ConstantArgument(name=parameter.name, value=parameter.default), parameter.name)
    return None


def _named_children(kwargs_spec: TreeSpec) -> Iterator[tuple[str, TreeSpec]]:
    yield from zip(kwargs_spec.context or [], tree_children(kwargs_spec), strict=True)
