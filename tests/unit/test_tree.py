"""Containers as data: flatten and unflatten are inverse to each other, and say where something does not fit."""

import ast
import collections
import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagepack.errors import InputError
from stagepack.format.tree import (
    ConstantLeaf,
    DictTree,
    NonFiniteLeaf,
    ObjectTree,
    SequenceTree,
    Tree,
    ValueLeaf,
    constant_value,
    flatten_tree,
    leaves_of_tree,
    type_name,
    unflatten_tree,
)

FACTORIES = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str, None: None}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
LEAVES = st.none() | st.booleans() | INTEGERS | st.floats() | TEXT
KEYS = st.none() | INTEGERS | TEXT | st.floats(allow_nan=False, allow_infinity=False)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Plain containers of things."""
    items = st.lists(inner, max_size=3)
    pairs = st.dictionaries(KEYS, inner, max_size=3)
    return (
        items
        | items.map(tuple)
        | st.builds(
            lambda held, more: collections.deque(held, maxlen=None if more is None else len(held) + more),
            items,
            st.none() | st.integers(0, 3),
        )
        | pairs
        | pairs.map(collections.OrderedDict)
        | st.builds(collections.defaultdict, st.sampled_from(list(FACTORIES.values())), pairs)
    )


OBJECTS = st.recursive(LEAVES, containers, max_leaves=12)


def tree_of(thing: Any) -> Tree:
    """The tree of a plain object, all of whose leaves are constants."""
    if isinstance(thing, list | tuple | collections.deque):
        kind: Any = type(thing).__name__
        return SequenceTree(kind=kind, items=tuple(map(tree_of, thing)), maxlen=getattr(thing, "maxlen", None))
    if isinstance(thing, dict):
        items = tuple((key, tree_of(part)) for key, part in thing.items())
        factory: Any = getattr(getattr(thing, "default_factory", None), "__name__", None)
        name: Any = type(thing).__name__
        return DictTree(kind=name, items=items, factory=factory)
    if isinstance(thing, float) and not math.isfinite(thing):
        return NonFiniteLeaf("nan" if math.isnan(thing) else "inf" if thing > 0 else "-inf")
    return ConstantLeaf(thing)


def same(one: Any, other: Any) -> bool:
    """Whether two objects are equal, types of all containers and leaves included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        kept = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        return kept and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | collections.deque):
        bound = getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return bound and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def at(place: str, thing: Any) -> Any:
    """What lies at a place such as ``x[0]['key']``, read as Python reads it."""
    expression = ast.parse(place, mode="eval").body
    keys = []
    while isinstance(expression, ast.Subscript):
        keys.append(ast.literal_eval(expression.slice))
        expression = expression.value
    for key in reversed(keys):
        thing = thing[key]
    return thing


@settings(derandomize=True, deadline=None, max_examples=200)
@given(OBJECTS)
def test_unflatten_is_the_inverse_of_flatten(thing: Any) -> None:
    tree = tree_of(thing)
    found = list(flatten_tree(tree, thing, "x"))
    assert [leaf for _, leaf, _ in found] == list(leaves_of_tree(tree))
    given_leaves = iter([part for _, _, part in found])
    assert same(unflatten_tree(tree, lambda _: next(given_leaves)), thing)
    assert same(unflatten_tree(tree, lambda leaf: None if isinstance(leaf, ValueLeaf) else constant_value(leaf)), thing)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(OBJECTS)
def test_flatten_names_each_place_as_python_reads_it(thing: Any) -> None:
    for place, _, part in flatten_tree(tree_of(thing), thing, "x"):
        assert same(at(place, thing), part)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(OBJECTS)
def test_a_tree_is_the_same_after_json(thing: Any) -> None:
    tree = tree_of(thing)
    text = json.dumps(msgspec.to_builtins(tree), allow_nan=False)
    assert msgspec.convert(json.loads(text), Tree) == tree


@settings(derandomize=True, deadline=None, max_examples=100)
@given(OBJECTS, OBJECTS)
def test_what_differs_is_refused_or_has_the_same_leaves(one: Any, other: Any) -> None:
    tree = tree_of(one)
    try:
        found = list(flatten_tree(tree, other, "x"))
    except InputError:
        with pytest.raises(InputError, match=r"(?s)^x(\[.*\])*: expected .*, found "):
            list(flatten_tree(tree, other, "x"))
    else:
        assert len(found) == len(list(leaves_of_tree(tree)))


X, Y = ValueLeaf("x"), ValueLeaf("y")
PAIR = SequenceTree(kind="tuple", items=(X, Y))
BATCH = DictTree(kind="dict", items=(("ids", X), ("mask", PAIR)))


@pytest.mark.parametrize(
    ("tree", "given", "says"),
    [
        (PAIR, 3, r"^batch: expected a tuple, found 3$"),
        (PAIR, "xy", r"^batch: expected a tuple, found str$"),
        (PAIR, [1, 2, 3], r"^batch: expected 2 items, found 3$"),
        (PAIR, {0: 1, 1: 2}, r"^batch: expected a tuple, found dict$"),
        (BATCH, [1, 2], r"^batch: expected a dict, found list$"),
        (BATCH, {"ids": 1}, r"^batch: expected the keys \['ids', 'mask'\], found \['ids'\]$"),
        (BATCH, {"ids": 1, "mask": (1, 2), "more": 3}, r"expected the keys \['ids', 'mask'\], found .*'more'"),
        (BATCH, {"ids": 1, "mask": 2.5}, r"^batch\['mask'\]: expected a tuple, found float$"),
        (BATCH, {"ids": 1, "mask": (1,)}, r"^batch\['mask'\]: expected 2 items, found 1$"),
        (
            ObjectTree(class_name="a.B", fields=(("x", X),)),
            3,
            r"^batch: expected a\.B or a dict of its fields, found int$",
        ),
        (
            ObjectTree(class_name="a.B", fields=(("x", X),)),
            {"y": 1},
            r"^batch: expected the keys \['x'\], found \['y'\]$",
        ),
    ],
)
def test_a_container_that_differs_is_named_with_its_place(tree: Tree, given: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        list(flatten_tree(tree, given, "batch"))


class Named(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Data:
    x: int
    y: int


class Thing:
    """A class that is neither."""


def object_tree(cls: type) -> ObjectTree:
    """An object with the fields x and y."""
    return ObjectTree(class_name=type_name(cls), fields=(("x", X), ("y", Y)))


@pytest.mark.parametrize("thing", [Named(1, 2), Data(1, 2), {"x": 1, "y": 2}, collections.UserDict(x=1, y=2)])
def test_objects_are_read_by_field(thing: Any) -> None:
    found = list(flatten_tree(object_tree(Named), thing, "p"))
    assert found == [("p['x']", X, 1), ("p['y']", Y, 2)]


@pytest.mark.parametrize("cls", [Named, Data])
def test_objects_are_built_of_the_types_that_the_caller_gives_and_of_no_other(cls: type) -> None:
    values = {"x": 1, "y": 2}
    tree = object_tree(cls)

    def leaf(found: Any) -> int:
        return values[found.name]

    assert unflatten_tree(tree, leaf) == values
    assert unflatten_tree(tree, leaf, [Thing]) == values
    built = unflatten_tree(tree, leaf, [Thing, cls])
    assert (type(built), built) == (cls, cls(1, 2))


def test_results_of_torch_are_tuples_in_bundles_that_do_not_say_it() -> None:
    built = unflatten_tree(
        ObjectTree(class_name="torch.return_types.max", fields=(("values", X), ("indices", Y))), lambda leaf: leaf
    )
    assert tuple(built) == (built.values, built.indices) == (X, Y)
    odd = ObjectTree(class_name="mine.class", fields=(("größe", X), ("_1", Y)), kind="tuple")
    assert unflatten_tree(odd, lambda leaf: leaf)._asdict() == {"größe": X, "_1": Y}
    for fields in ((("fi", X), ("\ufb01", Y)), (("values", X), ("class", Y)), (("__class__", X),), (("_1", X),)):
        assert unflatten_tree(ObjectTree(class_name="torch.return_types.max", fields=fields), str) == {
            name: str(leaf) for name, leaf in fields
        }


def test_a_type_that_does_not_take_the_fields_is_said() -> None:
    tree = ObjectTree(class_name=type_name(Named), fields=(("x", X), ("z", Y)))
    with pytest.raises(InputError, match=r"Named cannot be built from the fields \['x', 'z'\]"):
        unflatten_tree(tree, lambda _: 1, [Named])


def test_a_mapping_of_any_kind_stands_for_a_dict() -> None:
    given: Mapping[str, Any] = collections.ChainMap({"ids": 1}, {"mask": [2, 3]})
    assert [part for _, _, part in flatten_tree(BATCH, given, "batch")] == [1, 2, 3]
