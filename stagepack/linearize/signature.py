"""How a model or one of its modules is called -> `Signature`, with the container specs of torch (pytree) as trees of the format."""

import collections
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument

from stagepack.capture.captured_records import CapturedRecord
from stagepack.capture.traced_calls import TracedCall
from stagepack.errors import UnsupportedError
from stagepack.format.limits import is_plain
from stagepack.format.tree import (
    ConstantLeaf,
    DictTree,
    NonFiniteLeaf,
    ObjectTree,
    Parameter,
    SequenceTree,
    Signature,
    Tree,
    ValueLeaf,
    constant_identity,
    is_field_name,
    type_name,
)
from stagepack.torch_internals import TRANSFORMERS_IMPLIED_KINDS, TRANSFORMERS_KIND, TreeSpec, tree_children

# A leaf is the name of a value, or a constant.
SignatureLeaf = str | ConstantArgument
FactoryName = Literal["list", "dict", "set", "int", "float", "str"]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def container_tree(spec: TreeSpec, leaves: Iterator[SignatureLeaf], location: str) -> Tree:
    """Build the tree of nested containers."""
    if spec.is_leaf():
        return leaf_tree(next(leaves), location)
    container_type, context = spec.type, spec.context
    items = [container_tree(child, leaves, location) for child in tree_children(spec)]
    if container_type in (tuple, list, torch.Size):
        return SequenceTree(kind="list" if container_type is list else "tuple", items=tuple(items))
    if container_type is collections.deque:
        return SequenceTree(kind="deque", items=tuple(items), maxlen=context)
    if container_type is dict:
        return DictTree(kind="dict", items=_dict_items(context, items, location))
    if container_type is collections.OrderedDict:
        return DictTree(kind="OrderedDict", items=_dict_items(context, items, location))
    if container_type is collections.defaultdict:
        factory, keys = context
        pairs = _dict_items(keys, items, location)
        return DictTree(kind="defaultdict", items=pairs, factory=_factory_name(factory, location))
    if container_type is collections.namedtuple:  # noqa: PYI024 - pytree's type of all named tuples; the context is the class
        container_type = context
    assert container_type is not None
    if isinstance(context, dict) and TRANSFORMERS_KIND in context:
        return _registered_object_tree(context, items, location)
    if container_type is CapturedRecord:
        class_name, record_fields = context
        return ObjectTree(class_name=class_name, fields=tuple(zip(record_fields, items, strict=True)))
    field_names = _field_names(container_type, context, len(items))
    is_tuple = issubclass(container_type, tuple)
    if is_tuple:
        field_names = [
            field_name if is_field_name(field_name, index) else f"_{index}"
            for index, field_name in enumerate(field_names)
        ]
    fields = tuple(zip(field_names, items, strict=True))
    kind: Literal["object", "tuple"] = "tuple" if is_tuple else "object"
    return ObjectTree(class_name=type_name(container_type), fields=fields, kind=kind)


def leaf_tree(leaf: SignatureLeaf, location: str) -> Tree:
    """Return a leaf as a tree."""
    if isinstance(leaf, str):
        return ValueLeaf(leaf)
    constant = leaf.value
    if type(constant) is float and not math.isfinite(constant):
        if math.isnan(constant) and constant_identity(constant) != constant_identity(math.nan):
            raise UnsupportedError(
                f"{location} is a NaN with other bits than math.nan, which a bundle cannot hold: pass math.nan"
            )
        return NonFiniteLeaf("nan" if math.isnan(constant) else "inf" if constant > 0 else "-inf")
    if is_plain(constant):
        return ConstantLeaf(constant)
    raise UnsupportedError(f"{location} is the constant {constant!r}, which a bundle cannot hold")


def _registered_object_tree(entry: Any, items: Sequence[Tree], location: str) -> Tree:
    """The tree of an object that transformers has registered, such as a cache.

    The entry describes an attribute, or an item of it, with all that it holds; entries for tensors are numbers of items.
    """
    if isinstance(entry, list):
        return SequenceTree(kind="list", items=tuple(_registered_object_tree(part, items, location) for part in entry))
    if not isinstance(entry, dict):
        return leaf_tree(ConstantArgument(name=location, value=entry), location)
    kind = entry.get(TRANSFORMERS_KIND)
    if kind in ("tensor", "sym"):
        return items[entry["i"]]
    if kind not in (None, "obj", "map", "items"):
        raise UnsupportedError(f"{location} holds a {kind} ({entry.get('p', entry)}), which a bundle cannot hold")
    entries = entry if kind is None else dict(entry["s" if kind == "obj" else "v"])
    stored_entries = {
        key: part
        for key, part in entries.items()
        if not isinstance(part, dict) or part.get(TRANSFORMERS_KIND) not in TRANSFORMERS_IMPLIED_KINDS
    }
    trees = [_registered_object_tree(part, items, location) for part in stored_entries.values()]
    if kind == "obj":
        class_name = entry["p"].replace(":", ".")
        return ObjectTree(class_name=class_name, fields=tuple(zip(stored_entries, trees, strict=True)))
    return DictTree(kind="dict", items=_dict_items(list(stored_entries), trees, location))


def _factory_name(factory: type | None, location: str) -> FactoryName | None:
    if factory is None:
        return None
    if factory.__name__ not in get_args(FactoryName):
        raise UnsupportedError(f"{location} holds a defaultdict of {factory.__name__}, which a bundle cannot hold")
    return cast("FactoryName", factory.__name__)


def _field_names(container_type: type, context: Any, field_count: int) -> list[str]:
    """The names of the fields of an object, from what its registration as a pytree tells; else their numbers."""
    match_args = getattr(container_type, "__match_args__", ())
    if issubclass(container_type, tuple) and len(match_args) == field_count:
        return list(match_args)
    candidates = [context, context[0]] if isinstance(context, list | tuple) and context else []
    for candidate in candidates:
        if (
            isinstance(candidate, list | tuple)
            and len(candidate) == field_count
            and all(isinstance(item, str) for item in candidate)
        ):
            return list(candidate)
    return [str(field_index) for field_index in range(field_count)]


def _dict_items(keys: Sequence[Any], items: Sequence[Tree], location: str) -> tuple[tuple[Any, Tree], ...]:
    for key in keys:
        if not is_plain(key) or (isinstance(key, float) and not math.isfinite(key)):
            raise UnsupportedError(f"{location} holds a dict with the key {key!r}, which a bundle cannot hold")
    return tuple(zip(keys, items, strict=True))


def program_signature(
    program: ExportedProgram,
    inputs: Sequence[SignatureLeaf],
    results: Sequence[SignatureLeaf],
    model: torch.nn.Module | None,
) -> Signature:
    """Return the signature of a program: the parameters that the example passes, and the other parameters with a plain default."""
    leaves = iter(inputs)
    args_spec, kwargs_spec = tree_children(program.call_spec.in_spec)
    args = [container_tree(spec, leaves, "an input") for spec in tree_children(args_spec)]
    kwargs = {
        parameter_name: container_tree(spec, leaves, f"the input {parameter_name}")
        for parameter_name, spec in _named_children(kwargs_spec)
    }
    parameters = _captured_parameters(program, args, kwargs)
    if model is not None:
        parameters = _declared_parameters(inspect.signature(model.forward).parameters, args, kwargs)
    result = container_tree(program.call_spec.out_spec, iter(results), "the result")
    return Signature(parameters=tuple(parameters), result=result)


def call_signature(call: TracedCall, arguments: Sequence[SignatureLeaf], results: Sequence[SignatureLeaf]) -> Signature:
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
