"""The containers of a call as data: the arguments and the result, down to their leaves (SPEC T1 to T5).

Law: for every `x` made of plain containers, `unflatten_tree` builds an object equal to `x` from the leaves that `flatten_tree` yields.
"""

import collections
import dataclasses
import functools
import keyword
import struct
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from stagepack.errors import InputError
from stagepack.format.limits import Int64


class ValueLeaf(Struct, frozen=True, tag="value"):
    """A tensor or a symbolic scalar, by its value name."""

    name: str


class ConstantLeaf(Struct, frozen=True, tag="constant"):
    """A value that was fixed when the model was captured."""

    value: bool | Int64 | float | str | None


class NonFiniteLeaf(Struct, frozen=True, tag="nonfinite"):
    """A float constant that JSON cannot represent."""

    value: Literal["nan", "inf", "-inf"]


class SequenceTree(Struct, frozen=True, kw_only=True, tag="sequence", omit_defaults=True):
    """A tuple, a list or a deque.

    Attributes:
        kind: the class.
        items: the items in order.
        maxlen: the maximum length of a deque, if it has one.
    """

    kind: Literal["tuple", "list", "deque"]
    items: tuple["Tree", ...]
    maxlen: Int64 | None = None


class DictTree(Struct, frozen=True, kw_only=True, tag="dict", omit_defaults=True):
    """A dict, an ordered dict or a defaultdict.

    Attributes:
        kind: the class.
        items: pairs of key and tree, in order.
        factory: the default factory of a defaultdict, if it has one.
    """

    kind: Literal["dict", "OrderedDict", "defaultdict"]
    items: tuple[tuple[bool | Int64 | float | str | None, "Tree"], ...]
    factory: Literal["list", "dict", "set", "int", "float", "str"] | None = None


class ObjectTree(Struct, frozen=True, kw_only=True, tag="object", omit_defaults=True):
    """An object of another class.

    Attributes:
        class_name: the name of its class, which is never imported.
        fields: pairs of field name and tree.
        kind: whether it is a tuple whose items have names.
    """

    class_name: str
    fields: tuple[tuple[str, "Tree"], ...]
    kind: Literal["object", "tuple"] = "object"


class Record(dict[str, Any]):
    """The fields of an object whose class is not there: as items, as attributes, and those that are not None by their positions."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        # As attributes of the instance they come before the methods of a dict, such as `values`.
        vars(self).update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        # That of a dict calls `items`, which may be a field.
        return Record, (dict.copy(self),)

    def __missing__(self, key: object) -> Any:
        if type(key) is not int:
            raise KeyError(key)
        return [field for field in dict.values(self) if field is not None][key]

    def __getattr__(self, field_name: str) -> Any:
        raise AttributeError(f"expected one of the fields {', '.join(dict.keys(self))}, found {field_name}")


# The name of leaves whose value nothing uses. No graph has a value of this name.
UNUSED_VALUE: Final = "_"

Leaf = ValueLeaf | ConstantLeaf | NonFiniteLeaf
Key = bool | int | float | str | None
Tree = ValueLeaf | ConstantLeaf | NonFiniteLeaf | SequenceTree | DictTree | ObjectTree

_FACTORIES: Final = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str}
# The classes whose named tuples were recorded as objects before `ObjectTree.kind` was added.
_TORCH_RESULTS: Final = "torch.return_types."


def type_name(cls: type) -> str:
    """Return the name under which a class is recorded: ``module.qualified_name``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def tree_entries(tree: Tree) -> Iterable[tuple[Key, Tree]]:
    """Return the trees directly inside a container, each with its position, key or field name; nothing for a leaf."""
    if isinstance(tree, SequenceTree):
        return enumerate(tree.items)
    if isinstance(tree, DictTree):
        return tree.items
    return tree.fields if isinstance(tree, ObjectTree) else ()


def child_trees(tree: Tree) -> Iterator[Tree]:
    """Yield the trees directly inside a container; nothing for a leaf."""
    return (child for _, child in tree_entries(tree))


def leaves_of_tree(tree: Tree) -> Iterator[Leaf]:
    """Yield the leaves of a tree from left to right."""
    if isinstance(tree, ValueLeaf | ConstantLeaf | NonFiniteLeaf):
        yield tree
    for child in child_trees(tree):
        yield from leaves_of_tree(child)


def value_names(*trees: Tree) -> Iterator[str]:
    """Yield the value names in trees, from left to right and with repeats."""
    return (leaf.name for tree in trees for leaf in leaves_of_tree(tree) if isinstance(leaf, ValueLeaf))


def rename_values(tree: Tree, rename: Callable[[str], str]) -> Tree:
    """Return a tree with other value names."""
    if isinstance(tree, ValueLeaf):
        return ValueLeaf(rename(tree.name))
    if isinstance(tree, SequenceTree):
        return replace(tree, items=tuple([rename_values(item, rename) for item in tree.items]))
    if isinstance(tree, DictTree):
        return replace(tree, items=tuple([(key, rename_values(item, rename)) for key, item in tree.items]))
    if isinstance(tree, ObjectTree):
        return replace(tree, fields=tuple([(key, rename_values(item, rename)) for key, item in tree.fields]))
    return tree


class Parameter(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One parameter of a call.

    Attributes:
        name: the name of the parameter.
        tree: the containers and leaves of its argument.
        positional: whether it may be given by position. Positional parameters come first, in order.
        keyword: whether it may be given by name.
    """

    name: str
    tree: Tree
    positional: bool = False
    keyword: bool = True


class Signature(Struct, frozen=True, kw_only=True):
    """How a model or a module is called, and what it returns.

    Attributes:
        parameters: the parameters in order.
        result: the containers and leaves of the result.
    """

    parameters: tuple[Parameter, ...]
    result: Tree

    @property
    def trees(self) -> tuple[Tree, ...]:
        """The trees of the parameters in order, and then the tree of the result."""
        return (*(parameter.tree for parameter in self.parameters), self.result)

    def renamed(self, rename: Callable[[str], str]) -> "Signature":
        """Return the signature with other value names."""
        parameters = [replace(parameter, tree=rename_values(parameter.tree, rename)) for parameter in self.parameters]
        return Signature(parameters=tuple(parameters), result=rename_values(self.result, rename))


def signature_features(signatures: Iterable[Signature]) -> tuple[str, ...]:
    """Return the features that a reader of some signatures must know (SPEC M3 and T5)."""
    has_tuple = any(_has_named_tuple(tree) for signature in signatures for tree in signature.trees)
    return ("named_tuples",) if has_tuple else ()


def _has_named_tuple(tree: Tree) -> bool:
    is_named = isinstance(tree, ObjectTree) and tree.kind == "tuple"
    return is_named or any(map(_has_named_tuple, child_trees(tree)))


def constant_value(leaf: ConstantLeaf | NonFiniteLeaf) -> bool | float | str | None:
    """Return the Python value of a constant leaf."""
    return float(leaf.value) if isinstance(leaf, NonFiniteLeaf) else leaf.value


def constant_identity(constant: object) -> object:
    """Return what is equal for constants of one type and value, and of the same bits if they are floats.

    In Python 1, 1.0 and True are equal, so are 0.0 and -0.0, and no NaN equals itself.
    """
    return (type(constant), struct.pack("d", constant) if type(constant) is float else constant)


def is_field_name(field_name: str, index: int) -> bool:
    """Whether the item of a named tuple at an index may have this name: a public identifier, or ``_INDEX`` for one without a name."""
    return (_is_plain_identifier(field_name) and not field_name.startswith("_")) or field_name == f"_{index}"


def _is_plain_identifier(text: str) -> bool:
    """Whether a text is an identifier of Python that stands for itself alone, and no keyword."""
    # Python takes identifiers that have one normal form for one.
    return text.isidentifier() and not keyword.iskeyword(text) and unicodedata.normalize("NFKC", text) == text


def is_tuple(tree: ObjectTree) -> bool:
    """Whether an object is a tuple whose items have names. Named tuples of torch are known by their class in bundles that do not say it."""
    return tree.kind == "tuple" or (
        tree.class_name.startswith(_TORCH_RESULTS)
        and all(is_field_name(field_name, index) for index, (field_name, _) in enumerate(tree.fields))
    )


def flatten_tree(tree: Tree, argument: Any, location: str) -> Iterator[tuple[str, Leaf, Any]]:
    """Match an object with a tree.

    For an `ObjectTree`, a mapping is read by key; a named tuple, a dataclass, and an object of the recorded class are read by attribute;
    and where a named tuple is expected, a tuple without these names is read by position.
    """
    if isinstance(tree, SequenceTree):
        _require(isinstance(argument, list | tuple | collections.deque), f"a {tree.kind}", argument, location)
        _require(len(argument) == len(tree.items), f"{len(tree.items)} items", len(argument), location)
        for index, (item_tree, item) in enumerate(zip(tree.items, argument, strict=True)):
            yield from flatten_tree(item_tree, item, f"{location}[{index}]")
    elif isinstance(tree, DictTree):
        _require(isinstance(argument, Mapping), f"a {tree.kind}", argument, location)
        yield from _flatten_items(tree.items, argument, location)
    elif isinstance(tree, ObjectTree):
        yield from _flatten_items(tree.fields, _fields_of(tree, argument, location), location)
    else:
        yield location, tree, argument


def unflatten_tree(tree: Tree, build_leaf: Callable[[Leaf], Any], types: Collection[type] = ()) -> Any:
    """Build the object that a tree describes.

    An `ObjectTree` is built of its class, if this is among `types`: a named tuple, a dataclass or a mapping by calling the class with the
    fields as keyword arguments; another tuple with the items; an object of another class by setting its attributes. Otherwise it becomes a
    named tuple of its fields if it was a tuple, else a `Record`.
    """
    if isinstance(tree, SequenceTree):
        items = [unflatten_tree(item, build_leaf, types) for item in tree.items]
        if tree.kind == "deque":
            return collections.deque(items, maxlen=tree.maxlen)
        return items if tree.kind == "list" else tuple(items)
    if isinstance(tree, DictTree):
        pairs = {key: unflatten_tree(item, build_leaf, types) for key, item in tree.items}
        if tree.kind == "OrderedDict":
            return collections.OrderedDict(pairs)
        if tree.kind == "defaultdict":
            return collections.defaultdict(_FACTORIES[tree.factory] if tree.factory else None, pairs)
        return pairs
    if isinstance(tree, ObjectTree):
        fields = {key: unflatten_tree(item, build_leaf, types) for key, item in tree.fields}
        cls = next((cls for cls in types if type_name(cls) == tree.class_name), None)
        if cls is not None:
            return _build_object(cls, fields)
        if is_tuple(tree):
            return _named_tuple(tree.class_name, tuple(fields))(*fields.values())
        return Record(fields)
    return build_leaf(tree)


def fill_tree(tree: Tree, values: Mapping[str, Any], types: Collection[type] = ()) -> Any:
    """Build the object that a tree describes, of values by name; see `unflatten_tree`."""

    def leaf_value(leaf: Leaf) -> Any:
        return values[leaf.name] if isinstance(leaf, ValueLeaf) else constant_value(leaf)

    return unflatten_tree(tree, leaf_value, types)


@functools.lru_cache(maxsize=256)
def _named_tuple(class_name: str, field_names: tuple[str, ...]) -> Any:
    """A class for tuples with these names (T5)."""
    own_name = class_name.rpartition(".")[2]
    # `rename` gives items that have no name the name that the bundle states for them.
    return collections.namedtuple(  # noqa: PYI024 - the names are data
        own_name if _is_plain_identifier(own_name) else "NamedTuple", field_names, rename=True
    )


def _build_object(cls: type, fields: Mapping[str, Any]) -> Any:
    try:
        if issubclass(cls, tuple) and not hasattr(cls, "_fields"):
            return cls(fields.values())  # results of torch.return_types
        if dataclasses.is_dataclass(cls) or issubclass(cls, tuple | Mapping):
            return cls(**fields)
        built = cls.__new__(cls)
        vars(built).update(fields)
    except TypeError as error:
        raise InputError(f"{type_name(cls)} cannot be built from the fields {list(fields)}: {error}") from error
    return built


def _require(condition: bool, expected: str, argument: Any, location: str) -> None:
    if not condition:
        shown = argument if isinstance(argument, int) else type(argument).__name__
        raise InputError(f"{location}: expected {expected}, found {shown}")


def _flatten_items(
    item_trees: tuple[tuple[Any, Tree], ...], items: Mapping[Any, Any], location: str
) -> Iterator[tuple[str, Leaf, Any]]:
    expected_keys = [key for key, _ in item_trees]
    items_of_key = {constant_identity(key): item for key, item in items.items()}
    if set(map(constant_identity, expected_keys)) != items_of_key.keys():
        raise InputError(f"{location}: expected the keys {expected_keys}, found {list(items)}")
    for key, item_tree in item_trees:
        yield from flatten_tree(item_tree, items_of_key[constant_identity(key)], f"{location}[{key!r}]")


def _fields_of(tree: ObjectTree, argument: Any, location: str) -> Mapping[str, Any]:
    """The fields of an argument that stands for an object, by name."""
    if isinstance(argument, Mapping):
        return dict(argument)  # a `Record` may have a field `items` in the place of the method
    field_names = [field_name for field_name, _ in tree.fields]
    # Named tuples and the results of torch list their names there; other tuples have attributes too, such as `count`.
    has_names = {*field_names} <= {*getattr(type(argument), "__match_args__", ())}
    if is_tuple(tree) and isinstance(argument, list | tuple) and not has_names:
        _require(len(argument) == len(field_names), f"{len(field_names)} items", len(argument), location)
        return dict(zip(field_names, argument, strict=True))
    named_tuple_or_dataclass = dataclasses.is_dataclass(argument) or isinstance(argument, tuple)
    if named_tuple_or_dataclass or type_name(type(argument)) == tree.class_name:
        return {
            field_name: getattr(argument, field_name) for field_name in field_names if hasattr(argument, field_name)
        }
    raise InputError(f"{location}: expected {tree.class_name} or a dict of its fields, found {type(argument).__name__}")


def result_names(result: Tree, input_names: Collection[str]) -> dict[str, str]:
    """Return the names by which callers know the values of a result, such as ``logits`` or ``output.0``, with the names of the values."""
    names: dict[str, str] = {}
    for path, leaf in _result_leaves(result, ()):
        prefix = () if path and isinstance(path[0], str) else ("output",)
        output_name = ".".join(map(str, (*prefix, *path)))
        while output_name in names or output_name in input_names:
            output_name = f"output.{output_name}"
        names[output_name] = leaf.name
    return names


def _result_leaves(tree: Tree, path: tuple[Key, ...]) -> Iterator[tuple[tuple[Key, ...], ValueLeaf]]:
    """Yield the values of a result with their paths."""
    if isinstance(tree, ValueLeaf):
        yield path, tree
    for key, child in tree_entries(tree):
        yield from _result_leaves(child, (*path, key))
