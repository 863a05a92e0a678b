"""torch's tree specs and the call of the model -> `Signature`."""

import collections
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument
from torch.utils import _pytree as pytree

from stagepack.capture.module_calls import TracedCall
from stagepack.errors import UnsupportedError
from stagepack.format.codec import is_plain
from stagepack.format.signature import Parameter, Signature
from stagepack.format.tree import (
    ConstantLeaf,
    DictTree,
    NonFiniteLeaf,
    ObjectTree,
    SequenceTree,
    Tree,
    ValueLeaf,
    type_name,
)

_TAG = "_t"
_IMPLIED = ("dtype", "device", "layout", "type")  # what an object holds besides: its tensors tell
# A leaf is the name of a value, or a constant.
Leaf = str | ConstantArgument


def signature_of(
    program: ExportedProgram, inputs: Sequence[Leaf], results: Sequence[Leaf], forward: Callable[..., Any] | None
) -> Signature:
    """The signature of a program: the parameters that the example gave, and those with a plain default.

    Raises:
        UnsupportedError: a container or a constant that a bundle cannot hold.
    """
    spec = program.call_spec.in_spec
    leaves = iter(inputs)
    args = [_tree(child, leaves, "an input") for child in _children(_children(spec)[0])]
    keywords = _children(spec)[1]
    kwargs = {
        name: _tree(child, leaves, f"the input {name}")
        for name, child in zip(_context(keywords), _children(keywords), strict=True)
    }
    return Signature(
        parameters=tuple(_parameters(program, args, kwargs, forward)),
        result=_tree(program.call_spec.out_spec, iter(results), "the result"),
    )


def call_signature(call: TracedCall, given: Sequence[Leaf], results: Sequence[Leaf]) -> Signature:
    """The signature of a call of a module: what it was given, as it was given.

    Raises:
        UnsupportedError: a container or a constant that a bundle cannot hold.
    """
    leaves = iter(given)
    by_position, by_name = _children(call.arguments_spec)
    declared = [p for p in call.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    parameters = []
    for number, child in enumerate(_children(by_position)):
        known = declared[number] if number < len(declared) else None
        name = f"arg_{number}" if known is None else known.name
        keyword = known is not None and known.kind != known.POSITIONAL_ONLY
        tree = _tree(child, leaves, f"the argument {name}")
        parameters.append(Parameter(name=name, tree=tree, positional=True, keyword=keyword))
    for name, child in zip(_context(by_name), _children(by_name), strict=True):
        parameters.append(Parameter(name=name, tree=_tree(child, leaves, f"the argument {name}")))
    return Signature(parameters=tuple(parameters), result=_tree(call.results_spec, iter(results), "the result"))


def _parameters(
    program: ExportedProgram, args: list[Tree], kwargs: Mapping[str, Tree], forward: Callable[..., Any] | None
) -> Iterator[Parameter]:
    if forward is None:
        names = (
            program.module_call_graph[0].signature.forward_arg_names if program.module_call_graph[0].signature else None
        )
        names = (
            list(names or [])[: len(args)]
            if names and len(names) >= len(args)
            else [f"arg{n}" for n in range(len(args))]
        )
        yield from (Parameter(name=name, tree=tree, positional=True) for name, tree in zip(names, args, strict=True))
        yield from (Parameter(name=name, tree=tree) for name, tree in kwargs.items())
        return
    declared = inspect.signature(forward).parameters
    positional = [p for p in declared.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = dict(kwargs)
    contiguous = True
    late = []
    for number, parameter in enumerate(positional):
        tree = args[number] if number < len(args) else rest.pop(parameter.name, None)
        if tree is None:
            tree = _default(parameter)
        if tree is None:
            contiguous = False
        elif contiguous:
            yield Parameter(
                name=parameter.name, tree=tree, positional=True, keyword=parameter.kind != parameter.POSITIONAL_ONLY
            )
        else:
            late.append(Parameter(name=parameter.name, tree=tree))
    several = next((p.name for p in declared.values() if p.kind == p.VAR_POSITIONAL), "arg")
    for number, tree in enumerate(args[len(positional) :]):
        yield Parameter(name=f"{several}_{number}", tree=tree, positional=True, keyword=False)
    yield from late
    for parameter in declared.values():
        if parameter.kind == parameter.KEYWORD_ONLY:
            tree = rest.pop(parameter.name, None) or _default(parameter)
            if tree is not None:
                yield Parameter(name=parameter.name, tree=tree)
    yield from (Parameter(name=name, tree=tree) for name, tree in rest.items())


def _default(parameter: inspect.Parameter) -> Tree | None:
    """The default of a parameter that the example left out, when it is plain: passing it again changes nothing."""
    if is_plain(parameter.default):
        return _leaf(ConstantArgument(name=parameter.name, value=parameter.default), parameter.name)
    return None


def _tree(spec: pytree.TreeSpec, leaves: Iterator[Leaf], where: str) -> Tree:
    if spec.is_leaf():
        return _leaf(next(leaves), where)
    cls, context = spec.type, spec.context
    items = [_tree(child, leaves, where) for child in _children(spec)]
    if cls in (tuple, list, torch.Size):
        return SequenceTree(kind="list" if cls is list else "tuple", items=tuple(items))
    if cls is collections.deque:
        return SequenceTree(kind="deque", items=tuple(items), maxlen=context)
    if cls in (dict, collections.OrderedDict):
        return DictTree(kind="dict" if cls is dict else "OrderedDict", items=_pairs(context, items, where))
    if cls is collections.defaultdict:
        factory, keys = context
        name = None if factory is None else factory.__name__
        if name not in (None, "list", "dict", "set", "int", "float", "str"):
            raise UnsupportedError(f"{where} holds a defaultdict of {name}, which a bundle cannot hold")
        return DictTree(kind="defaultdict", items=_pairs(keys, items, where), factory=name)
    if cls is collections.namedtuple:  # noqa: PYI024 - pytree's mark of named tuples
        cls = context
    assert cls is not None
    if isinstance(context, dict) and _TAG in context:
        return _recorded(context, items, where)
    return ObjectTree(
        class_name=type_name(cls), fields=tuple(zip(_fields(cls, context, len(items)), items, strict=True))
    )


def _recorded(held: Any, items: Sequence[Tree], where: str) -> Tree:
    """The tree of an object that transformers has registered, such as a cache.

    Its context describes all that the object holds, by tags, with numbers for what is a child of the node.
    """
    if isinstance(held, list):
        return SequenceTree(kind="list", items=tuple(_recorded(part, items, where) for part in held))
    if not isinstance(held, dict):
        return _leaf(ConstantArgument(name=where, value=held), where)
    tag = held.get(_TAG)
    if tag in ("tensor", "sym"):
        return items[held["i"]]
    if tag not in (None, "obj", "map", "items"):
        raise UnsupportedError(f"{where} holds a {tag} ({held.get('p', held)}), which a bundle cannot hold")
    inside = held if tag is None else dict(held["s" if tag == "obj" else "v"])
    known = {key: part for key, part in inside.items() if not isinstance(part, dict) or part.get(_TAG) not in _IMPLIED}
    trees = [_recorded(part, items, where) for part in known.values()]
    if tag == "obj":
        return ObjectTree(class_name=held["p"].replace(":", "."), fields=tuple(zip(known, trees, strict=True)))
    return DictTree(kind="dict", items=_pairs(list(known), trees, where))


def _fields(cls: type, context: Any, count: int) -> list[str]:
    """The names of the fields of an object, from what its registration as a pytree tells; else their numbers."""
    if issubclass(cls, tuple) and len(getattr(cls, "__match_args__", ())) == count:
        return list(cls.__match_args__)  # type: ignore[attr-defined]
    for names in (context, context[0] if isinstance(context, list | tuple) and context else None):
        if isinstance(names, list | tuple) and len(names) == count and all(isinstance(name, str) for name in names):
            return list(names)
    return [str(number) for number in range(count)]


def _pairs(keys: Sequence[Any], items: Sequence[Tree], where: str) -> tuple[tuple[Any, Tree], ...]:
    for key in keys:
        if not is_plain(key) or (isinstance(key, float) and not math.isfinite(key)):
            raise UnsupportedError(f"{where} holds a dict with the key {key!r}, which a bundle cannot hold")
    return tuple(zip(keys, items, strict=True))


def _leaf(leaf: Leaf, where: str) -> Tree:
    if isinstance(leaf, str):
        return ValueLeaf(leaf)
    value = leaf.value
    if isinstance(value, float) and not math.isfinite(value):
        return NonFiniteLeaf("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
    if is_plain(value):
        return ConstantLeaf(value)
    raise UnsupportedError(f"{where} is the constant {value!r}, which a bundle cannot hold")


def _children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    return list(spec.children()) if callable(getattr(spec, "children", None)) else list(spec.children_specs)


def _context(spec: pytree.TreeSpec) -> Sequence[str]:
    return list(spec.context or [])
