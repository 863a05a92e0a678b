"""Folding: equal runs of nodes are stored once, and unfolding returns the same graph."""

import itertools
import random
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagepack.capture.inputs import Inputs
from stagepack.capture.programs import capture_module
from stagepack.format.folded_graph import (
    Hole,
    TemplateError,
    escape_template,
    fill_template,
    parse_template,
    trivially_folded,
    unfold_graph,
)
from stagepack.format.graph import FoldedGraph, Graph, ModuleCall, Node, Op, Region, Scope, Value, ValueArg, Weight
from stagepack.format.graph_codec import encode_graph, read_graph
from stagepack.format.shapes import Expr, Symbol
from stagepack.format.traversal import input_names, output_names
from stagepack.format.tree import Parameter, SequenceTree, Signature, ValueLeaf
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.folding import fold_graph
from stagepack.graph.model_assembly import canonical_graph
from stagepack.graph.repeats import find_repeats
from stagepack.linearize import linearize_program

ADD = Op(name="aten.add.Tensor", parameters=("self", "other"))
MUL = Op(name="aten.mul.Tensor", parameters=("self", "other"))
WRITE = Op(name="aten.add_.Tensor", parameters=("self", "other"), mutates=("self",), aliases=((0, "self"),))
VIEW = Op(name="aten.view.default", parameters=("self",), aliases=((0, "self"),))
OPS = (ADD, MUL, WRITE, VIEW)


class Build:
    """A graph while a test writes it, one node after another; every value is a vector of 4."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.weights: list[Weight] = []
        self.scopes: list[Scope] = []

    def weight(self, weight_name: str) -> str:
        value = f"w{len(self.weights)}"
        self.weights.append(Weight(value=value, names=(weight_name,), kind="parameter", dtype="float32", shape=(4,)))
        return value

    def __call__(self, op: Op, *arguments: str | float, scope: str = "", shape: tuple[int, ...] = (4,)) -> str:
        """Append a node, and return the name of its result."""
        value_name = f"{op.name.split('.')[1]}_{len(self.nodes)}"
        args = tuple(ValueArg(part) if isinstance(part, str) else part for part in arguments)
        if Scope(path=scope) not in self.scopes:
            self.scopes.append(Scope(path=scope))
        value = Value(name=value_name, dtype="float32", shape=shape)
        scope_index = self.scopes.index(Scope(path=scope))
        self.nodes.append(Node(op=OPS.index(op), args=args, outputs=(value,), scope=scope_index))
        return value_name

    def graph(self, *outputs: str) -> Graph:
        inputs = (Value(name="x", dtype="float32", shape=(4,)), Value(name="y", dtype="float32", shape=(4,)))
        return canonical_graph(
            Graph(
                inputs=inputs,
                weights=tuple(self.weights),
                nodes=tuple(self.nodes),
                outputs=outputs,
                ops=OPS,
                scopes=tuple(self.scopes),
                calls=tuple(self.calls()),
            )
        )

    def calls(self) -> Iterator[ModuleCall]:
        """The module calls with consecutive nodes: they take the inputs of their first node, and return the outputs of the last."""
        module_nodes: dict[str, list[int]] = {}
        for node_number, node in enumerate(self.nodes):
            parts = self.scopes[node.scope].path.split(".")
            for length in range(1, len(parts) + 1):
                module_nodes.setdefault(".".join(parts[:length]), []).append(node_number)
        for path, node_numbers in module_nodes.items():
            first, last = self.nodes[node_numbers[0]], self.nodes[node_numbers[-1]]
            if path and len(node_numbers) == node_numbers[-1] - node_numbers[0] + 1:
                parameters = [
                    Parameter(name=f"arg_{index}", tree=ValueLeaf(value_name), positional=True)
                    for index, value_name in enumerate(input_names(first))
                ]
                result = SequenceTree(kind="tuple", items=tuple(map(ValueLeaf, output_names(last))))
                signature = Signature(parameters=tuple(parameters), result=result)
                yield ModuleCall(path=path, first=str(node_numbers[0]), nodes=len(node_numbers), signature=signature)


def block(build: Build, x: str, path: str, scope: str | None = None, factor: float = 2.0, length: int = 6) -> str:
    hidden = x
    for _ in range(length - 2):
        hidden = build(MUL, hidden, factor, scope=path if scope is None else scope)
    hidden = build(MUL, hidden, build.weight(f"{path}.weight"), scope=path if scope is None else scope)
    return build(ADD, x, hidden, scope=path if scope is None else scope)


def sizes(graph: Graph) -> list[tuple[int, int]]:
    """The length of each repeat, and the number of its runs."""
    return [(repeat.length, len(repeat.starts)) for repeat in find_repeats(GraphAnalysis(graph)).repeats]


@pytest.mark.parametrize("scoped", [True, False])
def test_layers_stand_once(scoped: bool) -> None:
    build, x = Build(), "x"
    for layer in range(8):
        x = block(build, x, f"layers.{layer}", None if scoped else "")
    graph = build.graph(x)
    folded = fold_graph(graph)
    assert sizes(graph) == [(6, 8)]
    assert [len(region.nodes) for region in folded.regions] == [6]
    assert len(folded.regions[0].weights) == 1
    assert not folded.weights
    assert [call.path for call in folded.calls] == ["layers"] * scoped
    assert [call.path for call in folded.regions[0].calls] == ["layers.{0}"] * scoped
    assert len(folded.nodes) == 8
    assert unfold_graph(folded) == graph
    assert len(encode_graph(folded)) < len(encode_graph(trivially_folded(graph))) / 3


def test_layers_that_differ_in_one_place_stay_apart() -> None:
    build, x = Build(), "x"
    for layer in range(12):
        x = block(build, x, f"layers.{layer}", factor=3.0 if layer % 3 == 2 else 2.0)
    graph = build.graph(x)
    repeats = find_repeats(GraphAnalysis(graph)).repeats
    assert [(repeat.length, len(repeat.starts)) for repeat in repeats] == [(6, 8), (6, 4)]
    assert [start // 6 % 3 for start in repeats[1].starts] == [2] * 4
    assert unfold_graph(fold_graph(graph)) == graph


def test_a_module_and_the_same_nodes_in_no_module_of_their_own() -> None:
    build, x = Build(), "x"
    for path in ("first", "second", "third", "fourth"):
        x = block(build, x, path)
    for layer in range(2):
        for child in range(3):
            x = block(build, x, f"layers.{layer}.{child}", scope=f"layers.{layer}")
            x = build(ADD, x, float(child), scope=f"layers.{layer}")
    graph = build.graph(x)
    folded = fold_graph(graph)
    assert unfold_graph(folded) == graph
    assert sizes(graph) == [(21, 2), (6, 7)]
    assert [len(region.nodes) for region in folded.regions] == [6, 6]


def test_parts_inside_of_parts() -> None:
    build, x = Build(), "x"
    for layer in range(3):
        for step in range(5):
            x = block(build, x, f"layers.{layer}.steps.{step}")
        x = build(ADD, x, "y", scope=f"layers.{layer}")
    x = block(build, x, "head")
    graph = build.graph(x)
    folded = fold_graph(graph)
    assert sizes(graph) == [(31, 3), (6, 6)]
    assert [len(region.nodes) for region in folded.regions] == [6, 6]  # the second has five calls and a node
    bodies: list[Region | FoldedGraph] = [*folded.regions, folded]
    paths = [[call.path for call in body.calls] for body in bodies]
    assert paths == [["{0}"], ["layers.{0}.steps", "layers.{0}"], ["layers"]]
    assert unfold_graph(folded) == graph


def test_outputs_that_only_one_place_gives_do_not_keep_parts_apart() -> None:
    build, x = Build(), "x"
    inner_values = []
    for layer in range(6):
        x = block(build, x, f"layers.{layer}")
        inner_values.append(f"mul_{6 * layer + 2}")
    graph = build.graph(x, inner_values[3])
    assert sizes(graph) == [(6, 6)]
    assert unfold_graph(fold_graph(graph)) == graph


def test_what_is_given_twice_is_not_what_is_given_two_values() -> None:
    build, x = Build(), "x"
    for layer in range(8):
        for _ in range(4):
            x = build(MUL, x, 2.0, scope=f"layers.{layer}")
        x = build(ADD, x, x if layer % 2 else "y", scope=f"layers.{layer}")
    graph = build.graph(x)
    assert (5, 8) not in sizes(graph)
    assert unfold_graph(fold_graph(graph)) == graph


@pytest.mark.parametrize("op", [WRITE, VIEW])
def test_parts_that_reach_outside_are_left_alone(op: Op) -> None:
    build, x = Build(), "x"
    for layer in range(6):
        touched = build(op, "y", 1.0, scope=f"layers.{layer}")
        for _ in range(4):
            x = build(MUL, x, 2.0, scope=f"layers.{layer}")
        x = build(ADD, x, touched, scope=f"layers.{layer}")
    graph = build.graph(x, *(node.outputs[0].name for node in build.nodes if node.op == OPS.index(op)))  # type: ignore[union-attr]
    search_result = find_repeats(GraphAnalysis(graph))
    assert all(repeat.length < 6 for repeat in search_result.repeats)
    assert any(impure.repeat.length == 6 and len(impure.repeat.starts) == 6 for impure in search_result.impure)
    assert {"writes y" if op is WRITE else "is a view of y"} & {
        " ".join(impure.reason.split()[-len(["is", "a", "view", "of", "y"]) :])
        if op is VIEW
        else " ".join(impure.reason.split()[-2:])
        for impure in search_result.impure
    }
    assert unfold_graph(fold_graph(graph)) == graph


def test_symbols_and_types_count() -> None:
    symbols = tuple(Symbol(name=f"u{layer}") for layer in range(8))
    nodes, x = [], "x"
    for layer in range(8):
        for index in range(6):
            dim = Expr(op="mul", args=(f"u{layer}", 2 if index < 5 else f"u{layer}"))
            value = Value(name=f"mul_{6 * layer + index}", dtype="float32", shape=(dim, f"u{layer}"))
            nodes.append(Node(op=0, args=(ValueArg(x), index), outputs=(value,)))
            x = value.name if index < 5 else "x"
    graph = Graph(
        symbols=symbols,
        inputs=(Value(name="x", dtype="float32"),),
        nodes=tuple(nodes),
        outputs=("mul_47",),
        ops=(MUL,),
        scopes=(Scope(path=""),),
    )
    assert sizes(graph) == [(6, 8)]
    folded = fold_graph(graph)
    assert folded.regions[0].nodes[0].outputs[0].shape == (Expr(op="mul", args=("u{1}", 2)), "u{1}")  # type: ignore[union-attr]
    assert unfold_graph(folded) == graph
    output = nodes[6].outputs[0]
    assert output is not None
    nodes[6] = Node(op=0, args=nodes[6].args, outputs=(Value(name=output.name, dtype="float64", shape=output.shape),))
    changed = Graph(
        symbols=symbols, inputs=graph.inputs, nodes=tuple(nodes), outputs=graph.outputs, ops=(MUL,), scopes=graph.scopes
    )
    assert sizes(changed) == [(6, 7)]


def test_names_with_braces_and_without_a_pattern() -> None:
    build, x = Build(), "x"
    for path in ("{a}", "b}.1", "c", "{{d.07", "e.9"):
        x = block(build, x, path, length=9)
    graph = build.graph(x)
    folded = fold_graph(graph)
    assert len(folded.regions) == 1
    assert unfold_graph(folded) == graph
    assert read_graph(encode_graph(folded), "").graph == graph


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 7), st.integers(1, 6)), min_size=1, max_size=6),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_unfolding_gives_the_graph_back(parts: list[tuple[int, int, int]], scoped: bool, chance: random.Random) -> None:
    """Programs of loops of a few kinds of bodies, now and then with another constant, value or weight in the way."""
    build = Build()
    values = ["x", "y"]
    for loop, (kind, length, turns) in enumerate(parts):
        weights: list[str] = []
        for turn in range(turns):
            scope = f"p{loop}.{turn}" if scoped else ""
            x = values[-1]
            for index in range(length):
                op = OPS[(kind + index) % len(OPS)] if kind else (MUL, ADD)[index % 2]
                operand: str | float = values[-2] if index == kind else float(kind)
                if chance.random() < 0.05:
                    operand = chance.choice(values)
                if index % 3 == 1:
                    operand = (
                        chance.choice(weights)
                        if weights and chance.random() < 0.2
                        else build.weight(f"{loop}.{turn}.{index}")
                    )
                    weights.append(operand)
                x = build(op, x, operand, scope=scope)
            values.append(x)
    graph = build.graph(*dict.fromkeys((values[-1], chance.choice(values[2:]))))
    folded = fold_graph(graph)
    assert unfold_graph(folded) == graph
    assert read_graph(encode_graph(folded), "").graph == graph
    starts = sorted(
        (start, start + repeat.length)
        for repeat in find_repeats(GraphAnalysis(graph)).repeats
        for start in repeat.starts
    )
    for (first, end), (second, other_end) in itertools.combinations(starts, 2):
        assert end <= second or other_end <= end or (first == second and end <= other_end)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.text(max_size=8) | st.sampled_from(["{", "}", "{0}", "{{", "a.1", "٣"]), min_size=1, max_size=4))
def test_templates_give_texts_back(parts: list[str]) -> None:
    plain_text = "".join(parts)
    assert fill_template(escape_template(plain_text), []) == plain_text
    template = f"{escape_template(plain_text)}{Hole(0)}{Hole(1, 5)}{Hole(1, -2)}"
    assert fill_template(template, [plain_text, "2"]) == f"{plain_text}{plain_text}70"
    assert fill_template(str(Hole(0)), [plain_text]) == plain_text


@pytest.mark.parametrize(
    "template", ["{", "}", "{}", "{a}", "{0", "{00}", "{0+}", "{0+0}", "{0++1}", "{0}}", "{-1}", "{0+1.5}"]
)
def test_what_is_no_template(template: str) -> None:
    with pytest.raises(TemplateError, match="expected a template, found"):
        parse_template(template)


def test_ten_thousand_nodes_take_under_a_second() -> None:
    """Layers, the worst case of one operator over and over, and no repeats at all."""
    for graph in (
        many(160, 63, scoped=True),
        many(160, 63, scoped=False),
        many(10_000, 1, scoped=False),
        noise(10_000),
    ):
        assert len(graph.nodes) >= 10_000
        started = time.process_time()
        find_repeats(GraphAnalysis(graph))
        assert time.process_time() - started < 3


def many(layers: int, length: int, *, scoped: bool) -> Graph:
    """A graph of equal layers of nodes that differ inside of one."""
    build, x = Build(), "x"
    for layer in range(layers):
        for index in range(length):
            x = build(OPS[index % 2], x, float(index), scope=f"layers.{layer}" if scoped else "")
    return build.graph(x)


def noise(length: int) -> Graph:
    """A graph of nodes in no order."""
    build, x, chance = Build(), "x", random.Random(0)  # noqa: S311 - no secret
    for _ in range(length):
        x = build(chance.choice(OPS[:2]), x, float(chance.randrange(6)))
    return build.graph(x)


class Looped(torch.nn.Module):
    """Functions in a loop: no module tells where a turn begins."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.randn(4, 4) for _ in range(turns)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + torch.tanh(torch.nn.functional.gelu(x @ weight).softmax(-1) * 2).relu()
        return x


def test_a_python_loop_over_functions() -> None:
    capture = capture_module(Looped(6), Inputs(args=(torch.randn(2, 4),)))
    graph = canonical_graph(linearize_program(capture).graph)
    assert sizes(graph) == [(7, 6)]
    assert unfold_graph(fold_graph(graph)) == graph


def test_a_graph_in_another_order_is_not_folded() -> None:
    build, x = Build(), "x"
    for layer in range(6):
        x = block(build, x, f"layers.{layer}")
    graph = build.graph(x)
    turned = Graph(
        **{field: getattr(graph, field) for field in Graph.__struct_fields__} | {"weights": graph.weights[::-1]}
    )
    assert fold_graph(turned) == trivially_folded(turned)
