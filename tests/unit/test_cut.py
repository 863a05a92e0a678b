"""Where to cut, what crosses, and what must stay together."""

import contextlib
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stagepack
from stagepack.capture.inputs import Inputs
from stagepack.capture.programs import Capture, capture_module
from stagepack.errors import CutError
from stagepack.format.graph import Cost, Graph, Node, Op, Scope, Value, ValueArg, Weight
from stagepack.format.manifest import EntryPoint, Stage
from stagepack.format.tree import SequenceTree, Signature, ValueLeaf
from stagepack.format.validate.graph_rules import check_graph
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.model_assembly import canonical_graph, join_stages
from stagepack.partition.assignment import assign_by_modules, assign_by_positions, assign_consecutive, execution_order
from stagepack.partition.costs import graph_costs
from stagepack.partition.cut_options import CutOptions, PolicyNode, assign_by_policy
from stagepack.partition.partitioner import Cut, cut_graph, plan_for_assignment
from stagepack.partition.recipes import CostedGraph
from stagepack.partition.solver import balance_stages
from stagepack.roads.capture_writer import export_capture
from tests.modules import module_of
from tests.zoo.architectures.decoders import llama
from tests.zoo.cases import named
from tests.zoo.rows.build import Lambda


@st.composite
def graphs(draw: st.DrawFn, weighted: bool = False) -> Graph:
    """A graph of random data flow; `weighted` gives each node a weight of its own."""
    count = draw(st.integers(1, 12))
    nodes = []
    weights = []
    for node_number in range(count):
        sources = ["x", *(f"n{earlier}" for earlier in range(node_number))]
        args: list[ValueArg] = [
            ValueArg(value_name) for value_name in draw(st.lists(st.sampled_from(sources), min_size=1, max_size=3))
        ]
        if weighted:
            size = draw(st.integers(0, 9))
            weights.append(
                Weight(
                    value=f"w{node_number}",
                    names=(f"weight{node_number}",),
                    kind="parameter",
                    dtype="uint8",
                    shape=(size,),
                )
            )
            args.append(ValueArg(f"w{node_number}"))
        value = Value(name=f"n{node_number}", dtype="float32", shape=(draw(st.integers(0, 4)),))
        cost = Cost(bytes=draw(st.integers(0, 10**8)))
        nodes.append(Node(op=0, args=tuple(args), outputs=(value,), cost=cost))
    outputs = draw(
        st.lists(st.sampled_from(["x", *(f"n{node_number}" for node_number in range(count))]), min_size=1, unique=True)
    )
    return Graph(
        inputs=(Value(name="x", dtype="float32", shape=(2,)),),
        weights=tuple(weights),
        nodes=tuple(nodes),
        outputs=tuple(outputs),
        ops=(Op(name="test.join.default"),),
        scopes=(Scope(path=""),),
    )


def with_costs(graph: Graph) -> CostedGraph:
    """A graph whose weights have a byte for each element, with its costs."""
    costs = graph_costs(graph, {weight.stored: weight.shape[0] for weight in graph.weights})
    return CostedGraph(analysis=GraphAnalysis(graph), costs=costs)


def joined(result: Cut, graph: Graph) -> Graph:
    """The stages of a cut put together again."""
    stages = [
        Stage(graph="", nodes=len(stage.graph.nodes), added=stage.added_count, places=stage.node_runs)
        for stage in result.stages
    ]
    result_tree = SequenceTree(kind="tuple", items=tuple(map(ValueLeaf, graph.outputs)))
    entry_point = EntryPoint(
        name="forward",
        signature=Signature(parameters=(), result=result_tree),
        stages=tuple(stages),
        edges=result.edges,
        symbols=graph.symbols,
    )
    return join_stages(entry_point, [stage.graph for stage in result.stages])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(graphs(), st.data())
def test_any_order_of_stages_cuts_and_joins_again(graph: Graph, data: st.DataObject) -> None:
    labels = [data.draw(st.integers(0, 3)) for _ in graph.nodes]
    stages = None
    with contextlib.suppress(CutError):  # a cycle
        stages = assign_by_policy(GraphAnalysis(graph), lambda node: labels[node.index])
    flows = [
        (labels[int(leaf.name[1:])], labels[node_number])
        for node_number, node in enumerate(graph.nodes)
        for leaf in node.args
        if isinstance(leaf, ValueArg) and leaf.name[0] == "n"
    ]
    if stages is None:
        assert any(before > after for before, after in flows)
        return
    for shared in ("replicate", "transmit"):
        result = cut_graph(with_costs(graph), stages, shared)
        for stage_number, stage in enumerate(result.stages):
            assert list(check_graph(stage.graph, str(stage_number))) == []
        assert joined(result, graph) == canonical_graph(graph)
    for edge in result.edges:
        assert edge.producer is None or all(edge.producer < consumer for consumer in edge.consumers)
        assert edge.producer is None or edge.consumers or edge.name in graph.outputs


@settings(max_examples=150, deadline=None, derandomize=True)
@given(graphs(weighted=True), st.integers(1, 4), st.data())
def test_the_plan_is_the_best_of_all_cuts(graph: Graph, stages: int, data: st.DataObject) -> None:
    """By the times and the memory that plans state, which come from the nodes of a stage, wherever they stand."""
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=stages, max_size=stages))
    memory = data.draw(st.just([]) | st.lists(st.integers(5, 90), min_size=stages, max_size=stages))
    costed = with_costs(graph)
    if stages > len(graph.nodes):
        with pytest.raises(CutError, match=f"expected at most {len(graph.nodes)}, found {stages}"):
            balance_stages(costed, stages, memory=memory, speeds=speeds)
        return

    def slowest(positions: Sequence[int]) -> float:
        plan = plan_for_assignment(costed, assign_consecutive(execution_order(graph), positions))
        if any(stage.memory > limit for stage, limit in zip(plan.stages, memory, strict=False)):
            return math.inf
        return max(
            stage.picoseconds / speed + stage.receiving for stage, speed in zip(plan.stages, speeds, strict=False)
        )

    every = itertools.combinations(range(1, len(graph.nodes)), stages - 1)
    best = min(slowest(positions) for positions in every)
    if best == math.inf:
        with pytest.raises(CutError, match=r"no cut fits: in the nearest one, stage \d needs [\d.]+ k?B .* too little"):
            balance_stages(costed, stages, memory=memory, speeds=speeds)
        return
    positions = balance_stages(costed, stages, memory=memory, speeds=speeds)
    assert slowest(positions) == pytest.approx(best, rel=1e-12)


@pytest.fixture(scope="module")
def four_layers() -> Capture:
    return llama(4).capture()


@pytest.fixture(scope="module")
def skipping() -> Capture:
    """Four layers, of which the first gives to the last, too."""
    return named("values-skip-over-stages")[0].capture()


@pytest.mark.parametrize("layers", [(1, 3), (0,), (2,), (1, 2, 3)])
def test_between_the_layers_of_a_llama_the_hidden_state_crosses_alone(
    layers: tuple[int, ...], four_layers: Capture, tmp_path: Path
) -> None:
    cut_options = CutOptions(split_at=[f"model.layers.{layer}" for layer in layers])
    bundle = export_capture(four_layers, out=tmp_path / "m.stagepack", cut_options=cut_options)
    sent = [(edge.producer, edge.shape, edge.consumers) for edge in bundle.edges if edge.consumers]
    hidden = ("batch", "sequence", 32)
    expected = [(None, ("batch", "sequence"), (0,)), *((stage, hidden, (stage + 1,)) for stage in range(len(layers)))]
    assert sent == expected


def test_what_is_computed_in_place_is_computed_again(tmp_path: Path) -> None:
    def biased(self: Any, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])
        buckets = torch.zeros_like(positions)
        buckets += (positions[None] - positions[:, None]).abs().clamp(max=3)[0]
        bias = self.embed(buckets)  # as the position bias of T5
        return self.second(self.first(x) + bias) + bias

    first, second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
    model = module_of(biased, embed=torch.nn.Embedding(4, 32), first=first, second=second)
    dims = {"x": {0: torch.export.Dim("batch", max=8), 1: torch.export.Dim("sequence", min=2, max=64)}}
    bundle = stagepack.export(
        model, (torch.randn(2, 9, 32),), out=tmp_path / "m.stagepack", dynamic_shapes=dims, split_at=["second"]
    )
    crossing = [edge.shape for edge in bundle.edges if edge.producer == 0 and edge.consumers]
    assert crossing == [("batch", "sequence", 32)]
    again = [[graph.ops[node.op].name for node in graph.nodes] for graph in (bundle.graph(0), bundle.graph(1))]
    assert all("aten.add_.Tensor" in op_names for op_names in again)


def test_split_at_starts_a_stage_at_each_module(skipping: Capture, tmp_path: Path) -> None:
    bundle = export_capture(skipping, out=tmp_path / "m.stagepack", cut_options=CutOptions(split_at=["b", "d"]))
    first = [bundle.graph(stage).scopes[bundle.graph(stage).nodes[0].scope].path for stage in range(3)]
    assert first == ["a", "b", "d"]
    weight_names = [weight.names[0] for stage in range(3) for weight in bundle.graph(stage).weights]
    assert weight_names == ["a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias", "d.weight", "d.bias"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_at": ["layers.9"]}, "no operator comes from a module 'layers.9'"),
        ({"split_at": ["a"]}, "'a' starts the model"),
        ({"split_at": ["b", "b"]}, "start at the same operator"),
        ({"stages": 0}, "expected at least 1, found 0"),
        ({"policy": lambda node: node.index % 2}, r"cycle: stage [01] -\(\w+\)-> stage [01] -\(\w+\)-> stage [01]"),
        *(
            ({"policy": lambda _, answer=answer: answer}, "expected a stage number from 0 up")
            for answer in (-1, 1.0, None, True)
        ),
    ],
)
def test_a_cut_that_cannot_be_is_refused(
    options: dict[str, Any], message: str, skipping: Capture, tmp_path: Path
) -> None:
    with pytest.raises(CutError, match=message):
        export_capture(skipping, out=tmp_path / "m.stagepack", cut_options=CutOptions(**options))


def test_a_cut_through_written_state_is_refused_or_moved(tmp_path: Path) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        self.count.add_(1)
        return self.b(y) * self.count

    layers = {layer: torch.nn.Linear(4, 4) for layer in "ab"}
    capture = capture_module(Lambda(run, **layers, count=torch.zeros(1)), Inputs(args=(torch.randn(2, 4),)))
    cut_options = CutOptions(policy=lambda node: int(node.index > 1))
    with pytest.raises(CutError, match=r"'count' is written.*stage 0.*stage 1"):
        export_capture(capture, out=tmp_path / "torn.stagepack", cut_options=cut_options)
    bundle = export_capture(capture, out=tmp_path / "moved.stagepack", cut_options=CutOptions(split_at=["b"]))
    assert [stage.state for stage in bundle.stages] == [(), ("count",)]


@pytest.mark.parametrize("positions", [[0], [3, 3], [99]])
def test_empty_stages_are_refused(positions: list[int]) -> None:
    graph = Graph(
        inputs=(Value(name="x", dtype="float32"),),
        nodes=tuple(
            Node(op=0, args=(ValueArg("x"),), outputs=(Value(name=f"n{n}", dtype="float32"),)) for n in range(5)
        ),
        ops=(Op(name="test.join.default"),),
        scopes=(Scope(path=""),),
    )
    with pytest.raises(CutError, match="a stage would be empty"):
        assign_by_positions(GraphAnalysis(graph), execution_order(graph), positions)


def test_marks_in_the_models_code_are_cuts(tmp_path: Path) -> None:
    from torch.distributed.pipelining import pipe_split

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        stagepack.split_here()
        x = self.b(x)
        with torch.no_grad():
            x = self.c(x)
            pipe_split()
            return self.d(x)

    layers = {layer: torch.nn.Linear(4, 4) for layer in "abcd"}
    x = torch.randn(2, 4)
    model = Lambda(run, **layers)
    bundle = stagepack.export(model, (x,), out=tmp_path / "m.stagepack")
    expected = [["a.weight", "a.bias"], ["b.weight", "b.bias", "c.weight", "c.bias"], ["d.weight", "d.bias"]]
    assert [[weight.names[0] for weight in bundle.graph(stage).weights] for stage in range(3)] == expected
    assert torch.equal(stagepack.load(bundle)(x), model(x))


def test_a_policy_sees_nodes_and_may_go_back_and_forth(tmp_path: Path) -> None:
    seen: list[PolicyNode] = []

    def policy(node: PolicyNode) -> int:
        seen.append(node)
        return {"a": 5, "b": 2, "c": 2, "d": 5}.get(node.scope, 7)

    def run(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.a(x), self.b(x)
        return self.c(second) * 2, self.d(first) * 2

    x = torch.randn(2, 4)
    model = Lambda(run, **{layer: torch.nn.Linear(4, 4) for layer in "abcd"})
    bundle = stagepack.export(model, (x,), out=tmp_path / "m.stagepack", policy=policy)
    assert [node.op for node in seen[:2]] == ["aten.linear.default"] * 2
    assert seen[0].flops == 2 * 2 * 4 * 4
    expected = [{"b", "c"}, {"a", "d"}, set()]
    assert [{weight.names[0][0] for weight in bundle.graph(stage).weights} for stage in range(3)] == expected
    for ours, theirs in zip(stagepack.load(bundle)(x), model(x), strict=True):
        assert torch.equal(ours, theirs)


def test_more_stages_than_places_to_cut_at_are_refused(skipping: Capture, tmp_path: Path) -> None:
    with pytest.raises(CutError, match=r"stages: expected at most 8, found 9: the model has 8 operators$"):
        export_capture(skipping, out=tmp_path / "m.stagepack", cut_options=CutOptions(stages=9))
    bundle = export_capture(skipping, out=tmp_path / "m.stagepack", cut_options=CutOptions(stages=8))
    assert [stage.nodes for stage in bundle.stages] == [1] * 8
    written = named("aliasing-activation-written-in-place")[0].capture()
    together = "at most 2, found 4: the model has 6 operators, and those that use memory which calls write stay in one"
    with pytest.raises(CutError, match=together):
        export_capture(written, out=tmp_path / "n.stagepack", cut_options=CutOptions(stages=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 2, "split_at": ["a"]}, "expected one way to cut, found stages and split_at"),
        ({"split_at": "layers.2"}, r"split_at: expected a list, found 'layers.2'"),
        ({"stages": 1, "memory": "24GiB"}, r"memory: expected a list, found '24GiB'"),
        ({"stages": 1, "speeds": 2}, r"speeds: expected a list, found 2"),
        ({"stages": 1, "speeds": [float("inf")]}, "speeds: expected numbers from"),
        ({"speeds": [1]}, "pass stages=N too"),
        ({"shared": "both"}, "shared: expected 'replicate' or 'transmit', found 'both'"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CutError, match=message):
        CutOptions(**options)


def test_an_activation_is_bound_until_its_last_write() -> None:
    from stagepack.linearize import linearize_program

    graph = linearize_program(named("aliasing-activation-written-in-place")[0].capture()).graph
    analysis = GraphAnalysis(graph)
    (group,) = analysis.colocation_groups
    op_names = [graph.ops[graph.nodes[node_number].op].name for node_number in group.nodes]
    assert op_names == ["aten.linear.default", "aten.slice.Tensor", "aten.linear.default", "aten.mul_.Tensor"]
    assert assign_by_modules(analysis, execution_order(graph), ["c"]).stage_of == [0, 0, 0, 0, 1, 1]


def sent_values(bundle: stagepack.Bundle) -> list[tuple[int, str, tuple[int, ...]]]:
    """What stages send: the producer, the dtype and the consumers of each edge."""
    edges = [edge for edge in bundle.edges if edge.consumers]
    return sorted((edge.producer, edge.dtype, edge.consumers) for edge in edges if edge.producer is not None)


@pytest.mark.parametrize(
    ("adds", "split_at", "sent"),
    [
        (True, ["c"], [(0, "float32", (1,)), (0, "float32", (1,))]),
        (False, ["c"], [(0, "float32", (1,)), (0, "symint", (1,))]),
        (True, ["c", "d"], [(0, "float32", (1,)), (0, "float32", (2,)), (0, "symint", (1,)), (1, "float32", (2,))]),
        (False, ["c", "d"], [(0, "float32", (1,)), (0, "symint", (1,)), (1, "float32", (2,))]),
    ],
)
def test_no_tensor_is_sent_for_its_size(adds: bool, split_at: list[str], sent: list[Any], tmp_path: Path) -> None:
    """The size is asked of the result of a layer; its activation has the same size, and is added in the end or not."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        far = torch.relu(self.a(x))
        h = self.c(torch.relu(self.b(x[:, ::2]))).transpose(1, 2)
        h = self.d(torch.nn.functional.interpolate(h, size=far.shape[1]).transpose(1, 2))
        return h + far if adds else h

    shapes = {"args": ({1: 2 * torch.export.Dim("half", min=2, max=64)},)}
    model = Lambda(run, **{layer: torch.nn.Linear(4, 4) for layer in "abcd"})
    x, other = torch.randn(2, 16, 4), torch.randn(2, 26, 4)
    bundle = stagepack.export(model, (x,), out=tmp_path / "m.stagepack", dynamic_shapes=shapes, split_at=split_at)
    assert sent_values(bundle) == sent
    assert bundle.entry_point.plan is not None
    far_bytes = 2 * 16 * 4 * 4 if adds and split_at == ["c"] else 0
    assert bundle.entry_point.plan.stages[1].received == 2 * 8 * 4 * 4 + far_bytes
    pipe = stagepack.load(bundle)
    assert all(torch.equal(pipe(given), model(given)) for given in (x, other))


def test_sizes_of_views_and_sizes_from_data_are_sent_as_integers(tmp_path: Path) -> None:
    def run(self: Any, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        picked = self.a(x)[mask]
        h = self.b(x)
        asked = picked[:, None].expand(-1, 2, -1)  # for its sizes alone
        return h.new_ones(asked.shape[0], 2), h.sum(0) * asked.numel() + asked.stride(0), h

    x, mask = torch.randn(6, 4), torch.tensor([True, False, True, True, False, True])
    model = Lambda(run, a=torch.nn.Linear(4, 4), b=torch.nn.Linear(4, 4))
    bundle = stagepack.export(model, (x, mask), out=tmp_path / "m.stagepack", split_at=["b"])
    assert {(producer, dtype) for producer, dtype, _ in sent_values(bundle)} == {(0, "symint")}
    pipe = stagepack.load(bundle)
    for picks in (mask, ~mask):
        assert all(map(torch.equal, pipe(x, picks), model(x, picks)))
