"""Arguments are rebuilt leaf by leaf."""

import pytest

from stagepack.format.folded_graph import names_in, rename_node
from stagepack.format.graph import Argument, DictArg, ListArg, Node, SliceArg, TupleArg, Value, ValueArg
from stagepack.format.shapes import Expr
from stagepack.format.traversal import leaf_arguments, map_arguments

NESTED = ListArg(
    (
        ValueArg("a"),
        TupleArg((1, ValueArg("b"))),
        DictArg((("first", ValueArg("c")), ("second", None))),
        SliceArg(ValueArg("d"), 4, ListArg(())),
    )
)


@pytest.mark.parametrize("argument", [NESTED, ValueArg("a"), None, 1.5, TupleArg(())])
def test_mapping_the_identity_gives_an_equal_argument(argument: Argument) -> None:
    assert map_arguments(argument, lambda leaf: leaf) == argument


def test_leaves_are_mapped_from_left_to_right_and_containers_keep_their_kind() -> None:
    seen: list[Argument] = []

    def record(leaf: Argument) -> Argument:
        seen.append(leaf)
        return len(seen)

    mapped = map_arguments(NESTED, record)
    assert seen == list(leaf_arguments(NESTED))
    assert mapped == ListArg((1, TupleArg((2, 3)), DictArg((("first", 4), ("second", 5))), SliceArg(6, 7, ListArg(()))))


def test_renaming_a_node_takes_names_in_the_order_in_which_they_are_listed() -> None:
    product = Expr(op="mul", args=("n", 2))
    node = Node(
        op=0,
        args=(NESTED,),
        kwargs=(("other", ValueArg("e")),),
        outputs=(Value(name="f", dtype="float32", shape=(product, 3)), None),
    )
    listed = names_in(node, rename_node)
    assert listed == ["a", "b", "c", "d", "e", "f", "n"]
    renamed = rename_node(node, lambda name: f"{name}_new")
    assert names_in(renamed, rename_node) == [f"{name}_new" for name in listed]
    assert rename_node(renamed, lambda name: name.removesuffix("_new")) == node
