"""Containers of a call as data: what goes in and what comes out, down to its leaves (SPEC T1 to T4).

Law: ``unflatten(tree, flatten(tree, x)) == x`` for every `x` made of plain containers.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from stagepack.errors import InputError
from stagepack.format.limits import Int64


class ValueLeaf(Struct, frozen=True, tag="value"):
    """A tensor or a symbolic scalar: the name of a value."""

    name: str


class ConstantLeaf(Struct, frozen=True, tag="constant"):
    """A value that was fixed at export."""

    value: bool | Int64 | float | str | None


class NonFiniteLeaf(Struct, frozen=True, tag="nonfinite"):
    """A float constant that JSON cannot write."""

    value: Literal["nan", "inf", "-inf"]


class SequenceTree(Struct, frozen=True, kw_only=True, tag="sequence", omit_defaults=True):
    """A tuple, a list or a deque."""

    kind: Literal["tuple", "list", "deque"]
    items: tuple["Tree", ...]
    maxlen: Int64 | None = None


class DictTree(Struct, frozen=True, kw_only=True, tag="dict", omit_defaults=True):
    """A dict, an ordered dict, or a defaultdict of a plain factory."""

    kind: Literal["dict", "OrderedDict", "defaultdict"]
    items: tuple[tuple[bool | Int64 | float | str | None, "Tree"], ...]
    factory: Literal["list", "dict", "set", "int", "float", "str"] | None = None


class ObjectTree(Struct, frozen=True, kw_only=True, tag="object"):
    """An object of a class that is not plain: its name (never imported) and its fields."""

    class_name: str
    fields: tuple[tuple[str, "Tree"], ...]


# The name of a value that nothing uses, so that no graph has it.
UNUSED_VALUE: Final = "_"

Tree = ValueLeaf | ConstantLeaf | NonFiniteLeaf | SequenceTree | DictTree | ObjectTree

_FACTORIES: Final = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str}


def type_name(cls: type) -> str:
    """The name under which a class is recorded: ``module.qualified_name``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def child_trees(tree: Tree) -> Iterator[Tree]:
    """Yield the trees directly inside a container, or nothing for a leaf."""
    if isinstance(tree, SequenceTree):
        yield from tree.items
    elif isinstance(tree, DictTree):
        yield from (item for _, item in tree.items)
    elif isinstance(tree, ObjectTree):
        yield from (item for _, item in tree.fields)


def tree_leaves(tree: Tree) -> Iterator[ValueLeaf | ConstantLeaf | NonFiniteLeaf]:
    """Yield the leaves from left to right."""
    if isinstance(tree, ValueLeaf | ConstantLeaf | NonFiniteLeaf):
        yield tree
    for child in child_trees(tree):
        yield from tree_leaves(child)


def value_names(*trees: Tree) -> Iterator[str]:
    """Yield the names of the values in containers, from left to right."""
    return (leaf.name for tree in trees for leaf in tree_leaves(tree) if isinstance(leaf, ValueLeaf))


def rename_values(tree: Tree, name: Callable[[str], str]) -> Tree:
    """A tree with other names of values; `name` is asked from left to right."""
    if isinstance(tree, ValueLeaf):
        return ValueLeaf(name(tree.name))
    if isinstance(tree, SequenceTree):
        return replace(tree, items=tuple([rename_values(item, name) for item in tree.items]))
    if isinstance(tree, DictTree):
        return replace(tree, items=tuple([(key, rename_values(item, name)) for key, item in tree.items]))
    if isinstance(tree, ObjectTree):
        return replace(tree, fields=tuple([(key, rename_values(item, name)) for key, item in tree.fields]))
    return tree


def constant_value(leaf: ConstantLeaf | NonFiniteLeaf) -> bool | float | str | None:
    """The Python value of a constant leaf."""
    return float(leaf.value) if isinstance(leaf, NonFiniteLeaf) else leaf.value


def flatten_tree(
    tree: Tree, given: Any, where: str
) -> Iterator[tuple[str, ValueLeaf | ConstantLeaf | NonFiniteLeaf, Any]]:
    """Match an object against a tree; yield (place, leaf, what was given there) from left to right.

    Objects are read by field: a mapping by key; a named tuple, a dataclass, or what is of the recorded class by attribute.

    Raises:
        InputError: the containers differ.
    """
    if isinstance(tree, SequenceTree):
        _require(isinstance(given, list | tuple | collections.deque), f"a {tree.kind}", given, where)
        _require(len(given) == len(tree.items), f"{len(tree.items)} items", len(given), where)
        for position, (item, part) in enumerate(zip(tree.items, given, strict=True)):
            yield from flatten_tree(item, part, f"{where}[{position}]")
    elif isinstance(tree, DictTree):
        _require(isinstance(given, Mapping), f"a {tree.kind}", given, where)
        yield from _flatten_keys(tree.items, given, where)
    elif isinstance(tree, ObjectTree):
        yield from _flatten_keys(tree.fields, _fields(tree, given, where), where)
    else:
        yield where, tree, given


def unflatten_tree(
    tree: Tree, leaf: Callable[[ValueLeaf | ConstantLeaf | NonFiniteLeaf], Any], types: Collection[type] = ()
) -> Any:
    """Build the object that a tree describes; `leaf` gives the object of each leaf.

    An object whose class is among `types` is built from its fields: a named tuple, a dataclass or a mapping by calling the class,
    others by setting attributes. An object of another class is given back as a dict of its fields.

    Raises:
        InputError: a class of `types` does not take the fields that are recorded.
    """
    if isinstance(tree, SequenceTree):
        items = [unflatten_tree(item, leaf, types) for item in tree.items]
        if tree.kind == "deque":
            return collections.deque(items, maxlen=tree.maxlen)
        return items if tree.kind == "list" else tuple(items)
    if isinstance(tree, DictTree):
        pairs = {key: unflatten_tree(item, leaf, types) for key, item in tree.items}
        if tree.kind == "OrderedDict":
            return collections.OrderedDict(pairs)
        if tree.kind == "defaultdict":
            return collections.defaultdict(_FACTORIES[tree.factory] if tree.factory else None, pairs)
        return pairs
    if isinstance(tree, ObjectTree):
        fields = {name: unflatten_tree(item, leaf, types) for name, item in tree.fields}
        cls = next((cls for cls in types if type_name(cls) == tree.class_name), None)
        return fields if cls is None else _build(cls, fields)
    return leaf(tree)


def _build(cls: type, fields: Mapping[str, Any]) -> Any:
    try:
        if dataclasses.is_dataclass(cls) or issubclass(cls, tuple | Mapping):
            return cls(**fields)
        built = cls.__new__(cls)
        vars(built).update(fields)
    except TypeError as error:
        raise InputError(f"{type_name(cls)} cannot be built from the fields {list(fields)}: {error}") from error
    return built


def _require(holds: bool, expected: str, given: Any, where: str) -> None:
    if not holds:
        found = given if isinstance(given, int) else type(given).__name__
        raise InputError(f"{where}: expected {expected}, found {found}")


def _flatten_keys(
    items: tuple[tuple[Any, Tree], ...], given: Mapping[Any, Any], where: str
) -> Iterator[tuple[str, ValueLeaf | ConstantLeaf | NonFiniteLeaf, Any]]:
    expected = [key for key, _ in items]
    if set(expected) != set(given):
        raise InputError(f"{where}: expected the keys {expected}, found {list(given)}")
    for key, item in items:
        yield from flatten_tree(item, given[key], f"{where}[{key!r}]")


def _fields(tree: ObjectTree, given: Any, where: str) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    if dataclasses.is_dataclass(given) or isinstance(given, tuple) or type_name(type(given)) == tree.class_name:
        return {name: getattr(given, name) for name, _ in tree.fields if hasattr(given, name)}
    raise InputError(f"{where}: expected {tree.class_name} or a dict of its fields, found {type(given).__name__}")
