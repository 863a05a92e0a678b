"""Work on a graph grows with its size: whatever calls what, and whatever values are called."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from stagepack.format.aliasing import alias_classes
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.folded_graph import trivially_folded
from stagepack.format.graph import Argument, Graph, ListArg, Node, Op, Scope, Subgraph, SubgraphArg, Value, ValueArg
from stagepack.format.shapes import Dim, Expr
from stagepack.format.traversal import subgraph_indices
from stagepack.format.validate.graph_rules import check_graph
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.model_assembly import canonical_graph
from stagepack.partition.assignment import node_dependencies
from stagepack_loaders.torch.build import build_graph_module
from stagepack_loaders.torch.resolved_operators import resolve_operators

RELU = Op(name="aten.relu.default", schema="aten::relu(Tensor self) -> Tensor", parameters=("self",))
UNBIND = Op(
    name="aten.unbind.int",
    schema="aten::unbind.int(Tensor(a -> *) self, int dim=0) -> Tensor(a)[]",
    parameters=("self", "dim"),
    aliases=((0, "self"),),
)
COND = Op(name="higher_order.cond")
# An operator without a schema, whose list is a view of a list that it also writes.
LISTED = Op(name="higher_order.map_impl", parameters=("items",), mutates=("items",), aliases=((0, "items"),))
CPU = torch.device("cpu")


def step_count(action: Callable[[], object]) -> int:
    """The number of lines and calls of Python while an action runs: its work, whatever the speed of the machine."""
    count = 0

    def trace(_frame: FrameType, _event: str, _argument: object) -> Any:
        nonlocal count
        count += 1
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(earlier)
    return count


def assert_linear(work: Callable[[int], Callable[[], object]], size: int) -> None:
    """Check that twice the size is at most three times the work."""
    assert step_count(work(2 * size)) < 3 * step_count(work(size))


def value(value_name: str) -> Value:
    return Value(name=value_name, dtype="float32", shape=(2,))


def graph_of(nodes: list[Node], *, inputs: list[str], **tables: object) -> Graph:
    graph = Graph(
        inputs=tuple(map(value, inputs)),
        nodes=tuple(nodes),
        outputs=(inputs[0],),
        ops=(RELU, UNBIND, COND, LISTED),
        scopes=(Scope(path=""),),
        **tables,  # type: ignore[arg-type]
    )
    assert list(check_graph(graph, "")) == []
    return graph


def subgraphs_that_call_two(depth: int) -> Graph:
    """Subgraphs that each call the two before them, so that the calls of the last one are as many as a Fibonacci number."""

    def call(subgraph_index: int, result_name: str) -> Node:
        branches = (SubgraphArg(subgraph_index), SubgraphArg(max(0, subgraph_index - 1)))
        args: tuple[Argument, ...] = (True, *branches, ListArg((ValueArg("x"),)))
        return Node(op=2, args=args, outputs=(value(result_name),), unpack=True)

    first = Node(op=0, args=(ValueArg("x"),), outputs=(value("y"),))
    bodies = [first, *(call(index, "y") for index in range(depth - 1))]
    subgraphs = tuple(
        Subgraph(inputs=(value("x"),), nodes=(body,), result=ListArg((ValueArg("y"),))) for body in bodies
    )
    return graph_of([call(depth - 1, "result")], inputs=["x"], subgraphs=subgraphs)


@pytest.mark.parametrize(
    "work",
    [
        lambda graph: list(node_dependencies(GraphAnalysis(graph))),
        lambda graph: canonical_graph(graph),
        lambda graph: alias_classes(graph),
    ],
    ids=["random-numbers", "copies", "memory"],
)
def test_a_subgraph_is_looked_at_once(work: Callable[[Graph], object]) -> None:
    # At depth 24, a subgraph would be called 46,368 times.
    graph = subgraphs_that_call_two(24)
    assert step_count(lambda: work(graph)) < 20_000


def test_copied_subgraphs_are_all_there_and_call_each_other() -> None:
    canonical = canonical_graph(subgraphs_that_call_two(20))
    called = [[*subgraph_indices(node)] for subgraph in canonical.subgraphs for node in subgraph.nodes]
    assert called == [[], *([index, max(0, index - 1)] for index in range(19))]
    assert canonical_graph(canonical) == canonical


def test_random_numbers_are_found_in_subgraphs_of_subgraphs() -> None:
    graph = subgraphs_that_call_two(4)
    random_ops = (Op(name=RELU.name, schema=RELU.schema, parameters=RELU.parameters, random=True), *graph.ops[1:])
    tables = {name: getattr(graph, name) for name in graph.__struct_fields__}
    assert GraphAnalysis(graph).random_nodes == frozenset()
    assert GraphAnalysis(Graph(**(tables | {"ops": random_ops}))).random_nodes == {0}


def test_views_of_a_list_are_joined_in_linear_time() -> None:
    def work(count: int) -> Callable[[], object]:
        inputs = [f"i{index}" for index in range(count)]
        items = ListArg(tuple(map(ValueArg, inputs)))
        node = Node(op=3, args=(items,), outputs=tuple(value(f"o{index}") for index in range(count)), unpack=True)
        graph = graph_of([node], inputs=inputs)
        classes = alias_classes(graph)
        assert len({classes.representative(name) for name in (*inputs, "o0", f"o{count - 1}")}) == 1
        assert classes.is_written("o0")
        return lambda: alias_classes(graph)

    assert_linear(work, 100)


def test_operators_with_many_parameters_are_read_once() -> None:
    def work(count: int) -> Callable[[], object]:
        names = tuple(f"p{index}" for index in range(count))
        op = Op(
            name="higher_order.map_impl", parameters=names, mutates=names, aliases=tuple((0, name) for name in names)
        )
        nodes = [Node(op=0, args=(ValueArg("x"),), outputs=(value(f"v{index}"),)) for index in range(count)]
        graph = Graph(inputs=(value("x"),), nodes=tuple(nodes), outputs=("x",), ops=(op,), scopes=(Scope(path=""),))
        return lambda: alias_classes(graph)

    assert_linear(work, 100)


def test_sizes_that_follow_from_each_other_are_found_in_linear_time() -> None:
    def work(count: int) -> Callable[[], object]:
        # Each size follows from the next one only.
        dims: list[Dim] = [Expr(op="mul", args=(f"s{index}", f"s{index + 1}")) for index in range(count)]
        dims.append(f"s{count}")
        values = [Value(name=f"v{index}", dtype="symint", expr=dim) for index, dim in enumerate(dims)]
        bound = {value.name: BoundArgument(value.name, 1) for value in values}
        assert check_values(values, bound, ()) == dict.fromkeys((f"s{index}" for index in range(count + 1)), 1)
        return lambda: check_values(values, bound, ())

    assert_linear(work, 100)


@pytest.mark.parametrize("form", ["given{}", "given0{:05}"])
def test_a_prefix_that_no_value_has_is_found_in_linear_time(form: str) -> None:
    def work(count: int) -> Callable[[], object]:
        names = [form.format(index) for index in range(count)]
        # The last names first: a prefix starts many names.
        graph = graph_of([], inputs=names[::-1])
        module = build_graph_module(trivially_folded(graph), graph, resolve_operators(graph.ops, (), ""), CPU)
        found = module(*(torch.full((2,), float(index)) for index in range(count)))
        assert float(found[0][0]) == 0
        return lambda: build_graph_module(trivially_folded(graph), graph, [], CPU)

    assert_linear(work, 300)


def test_nodes_without_a_name_are_numbered_in_linear_time() -> None:
    def work(count: int) -> Callable[[], object]:
        def named(number: int) -> Node:
            return Node(op=0, args=(ValueArg("x"),), outputs=(value(f"unbind_int_{number}"),))

        without_results = Node(op=1, args=(ValueArg("x"),), unpack=True)
        nodes = [named(number) for number in range(count, 2 * count)]
        for number in reversed(range(count)):
            nodes += [named(number), without_results]
        graph = graph_of(nodes, inputs=["x"])
        operators = resolve_operators(graph.ops[:2], (), "")
        return lambda: build_graph_module(trivially_folded(graph), graph, operators, CPU)

    assert_linear(work, 200)
