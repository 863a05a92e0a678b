"""What follows from a graph, and that it is computed once."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from stagepack.format.aliasing import ColocationGroup, alias_classes, colocation_groups
from stagepack.format.graph import Cost, Graph, Node, Op, Scope, Value, ValueArg, Weight
from stagepack.graph import analysis as graph_analysis
from stagepack.graph.analysis import GraphAnalysis
from stagepack.partition import recipes
from stagepack.partition.assignment import NodeOrder, execution_order
from stagepack.partition.costs import graph_costs
from stagepack.partition.cut_options import CutOptions
from stagepack.partition.partitioner import partition_graph
from stagepack.partition.recipes import recomputation_recipes

ADD = Op(name="aten.add.Tensor", parameters=("self", "other"))
VIEW = Op(name="aten.view.default", parameters=("self",), aliases=((0, "self"),))
WRITE = Op(name="aten.add_.Tensor", parameters=("self", "other"), mutates=("self",), aliases=((0, "self"),))
OPS = (ADD, VIEW, WRITE)


def graph_of(*calls: tuple[Op, str, *tuple[str, ...]], outputs: tuple[str, ...]) -> Graph:
    """A graph whose nodes are (operator, name of the result, names of the arguments); `x` is its input, `count` a buffer."""
    nodes = (
        Node(
            op=OPS.index(op),
            args=tuple(map(ValueArg, used_names)),
            outputs=(Value(name=result_name, dtype="float32", shape=(4,)),),
            cost=Cost(bytes=32),
        )
        for op, result_name, *used_names in calls
    )
    return Graph(
        inputs=(Value(name="x", dtype="float32", shape=(4,)),),
        weights=(Weight(value="count", names=("counter.count",), kind="buffer", dtype="float32", shape=(4,)),),
        nodes=tuple(nodes),
        outputs=outputs,
        ops=OPS,
        scopes=(Scope(path=""),),
    )


STATEFUL = graph_of(
    (WRITE, "counted", "count", "x"),
    (ADD, "a", "x", "x"),
    (ADD, "b", "a", "x"),
    (VIEW, "v", "b"),
    (ADD, "c", "v", "counted"),
    outputs=("c", "a"),
)


def test_producers_users_and_last_uses() -> None:
    analysis = GraphAnalysis(STATEFUL)
    assert analysis.node_inputs == (("count", "x"), ("x",), ("a", "x"), ("b",), ("v", "counted"))
    assert analysis.producers == {"counted": 0, "a": 1, "b": 2, "v": 3, "c": 4}
    assert analysis.users == {"count": (0,), "x": (0, 1, 2), "a": (2,), "b": (3,), "v": (4,), "counted": (4,)}
    assert analysis.last_uses == {"count": 0, "x": 2, "a": 5, "b": 3, "v": 4, "counted": 4, "c": 5}
    assert list(analysis.values) == ["x", "counted", "a", "b", "v", "c"]
    assert list(analysis.used_by([2, 1])) == ["a", "x"]
    assert list(analysis.defined_by([2, 1])) == ["b", "a"]


def test_classes_and_groups_of_written_state() -> None:
    analysis = GraphAnalysis(STATEFUL)
    classes = analysis.alias_classes
    assert classes.representative("counted") == classes.representative("count")
    assert classes.representative("v") == "b"
    assert classes.is_written("counted")
    assert not classes.is_written("v")
    assert analysis.colocation_groups == (ColocationGroup(name="counter.count", nodes=(0, 4)),)
    assert analysis.written_weight_names == ("counter.count",)


def test_positions_of_an_order() -> None:
    order = NodeOrder([3, 1, 2, 3, 4])
    assert order.node_numbers == [1, 2, 0, 3, 4]
    assert order.positions == [2, 0, 1, 3, 4]
    assert [order.position_in_front_of(node) for node in range(6)] == [0, 0, 1, 2, 4, 5]
    assert not order.is_execution_order
    assert execution_order(STATEFUL).is_execution_order


@pytest.mark.parametrize("options", [CutOptions(stages=2), CutOptions(policy=lambda node: 0), CutOptions()])
def test_a_plan_analyzes_its_graph_once(options: CutOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls[function.__name__] += 1
            return function(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(graph_analysis, "alias_classes", counted(alias_classes))
    monkeypatch.setattr(graph_analysis, "colocation_groups", counted(colocation_groups))
    monkeypatch.setattr(recipes, "recomputation_recipes", counted(recomputation_recipes))
    partition_graph(STATEFUL, graph_costs(STATEFUL, {"counter.count": 16}), options)
    assert calls == {"alias_classes": 1, "colocation_groups": 1, "recomputation_recipes": 1}
