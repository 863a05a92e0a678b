"""A graph becomes fx: names and texts of a bundle never become code of their own, regions open and close."""

import copy
import inspect
import itertools
from collections.abc import Sequence

import pytest
import torch

from stagepack.errors import OperatorError
from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.folded_graph import trivially_folded, unfold_graph
from stagepack.format.graph import (
    Autocast,
    Context,
    FoldedGraph,
    Graph,
    Node,
    Op,
    Region,
    RegionCall,
    Scope,
    Value,
    ValueArg,
)
from stagepack.format.shapes import Expr, evaluate_dim
from stagepack.format.validate.graph_rules import check_graph
from stagepack.graph.region_functions import folded_functions
from stagepack.linearize import linearize_program
from stagepack_loaders.torch.build import build_graph_module
from stagepack_loaders.torch.resolved_operators import resolve_operators
from stagepack_loaders.torch.torch_attributes import torch_attribute
from tests.zoo import cases

CPU = torch.device("cpu")
ADD = Op(name="aten.add.Tensor", schema=str(torch.ops.aten.add.Tensor._schema), parameters=("self", "other", "alpha"))
NAMES = ["self", "torch", "device", "print", "_text_0", "inf", "input_0", "fx_pytree", "math", "operator", "getitem"]
NAMES += ["type", "aten_add_Tensor"]


def test_values_may_have_any_identifier_as_name() -> None:
    values = [Value(name=name, dtype="float32", shape=(2,)) for name in NAMES]
    nodes = tuple(
        Node(op=0, args=(ValueArg(a.name), ValueArg(b.name)), outputs=(Value(name=f"{a.name}_", dtype="float32"),))
        for a, b in itertools.pairwise(values)
    )
    outputs = tuple(output.name for node in nodes for output in node.outputs if output)
    graph = Graph(inputs=tuple(values), nodes=nodes, outputs=outputs, ops=(ADD,), scopes=(Scope(path=""),))
    assert list(check_graph(graph, "")) == []
    given = [torch.full((2,), float(number)) for number in range(len(values))]
    found = build_graph_module(trivially_folded(graph), graph, resolve_operators(graph.ops, (), ""), CPU)(*given)
    assert [float(tensor[0]) for tensor in found] == [2.0 * number + 1 for number in range(len(nodes))]


def test_compilers_trace_all_operators_and_copies_call_them() -> None:
    values = [Value(name=name, dtype="float32", shape=(2,)) for name in "xyz"]
    node = Node(op=0, args=(ValueArg("x"), ValueArg("y")), outputs=(values[2],))
    graph = Graph(inputs=tuple(values[:2]), nodes=(node,), outputs=("z",), ops=(ADD,), scopes=(Scope(path=""),))
    module = build_graph_module(trivially_folded(graph), graph, resolve_operators(graph.ops, (), ""), CPU)
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    traced = torch.compile(module, backend="eager", fullgraph=True)
    program = torch.export.export(module, (x, y))
    for function in (module, traced, program.module(), copy.deepcopy(module)):
        assert torch.equal(function(x, y)[0], x + y)
    assert any(fx_node.target is torch.ops.aten.add.Tensor for fx_node in program.graph.nodes)


def test_modules_have_code_objects_of_their_own() -> None:
    """A compiler compiles a code object for at most 8 modules."""
    graph = linearize_program(cases.named("operators-text-arguments")[0].capture()).graph
    operators = resolve_operators(graph.ops, (), "")
    modules = [build_graph_module(trivially_folded(graph), graph, operators, CPU) for _ in range(2)]
    codes = [inspect.unwrap(type(module).forward).__code__ for module in modules]
    assert codes[0] is not codes[1]


def test_an_operator_that_a_library_registers_again_is_called() -> None:
    def register(factor: float) -> None:
        @torch.library.custom_op("stagepack_test::scaled", mutates_args=())
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * factor

    register(2.0)
    op = Op(name="stagepack_test.scaled", schema="stagepack_test::scaled(Tensor x) -> Tensor", parameters=("x",))
    node = Node(op=0, args=(ValueArg("x"),), outputs=(Value(name="y", dtype="float32"),))
    x = Value(name="x", dtype="float32", shape=(1,))
    graph = Graph(inputs=(x,), nodes=(node,), outputs=("y",), ops=(op,), scopes=(Scope(path=""),))
    operators = resolve_operators(graph.ops, ["stagepack_test"], "")
    module = build_graph_module(trivially_folded(graph), graph, operators, CPU)
    assert module(torch.ones(1))[0] == 2
    register(3.0)
    assert module(torch.ones(1))[0] == 3


def test_texts_hang_on_the_module_and_are_not_in_the_code() -> None:
    graph = linearize_program(cases.named("operators-text-arguments")[0].capture()).graph
    module = build_graph_module(trivially_folded(graph), graph, resolve_operators(graph.ops, (), ""), CPU)
    assert "tanh" not in module.code.replace("aten.tanh", "")
    assert {"tanh", "bi,ij->bj"} <= {value for value in vars(module).values() if isinstance(value, str)}


def test_regions_are_closed_when_something_inside_raises() -> None:
    autocast = Autocast(device=None, dtype="bfloat16", enabled=True, cache=True)
    node = Node(op=0, args=(ValueArg("x"), ValueArg("y")), outputs=(Value(name="z", dtype="float32"),), context=1)
    graph = Graph(
        inputs=(Value(name="x", dtype="float32"), Value(name="y", dtype="float32")),
        nodes=(node,),
        outputs=("z",),
        ops=(ADD,),
        scopes=(Scope(path=""),),
        contexts=(Context(grad=False), Context(parent=0, autocast=autocast)),
    )
    module = build_graph_module(trivially_folded(graph), graph, resolve_operators(graph.ops, (), ""), CPU)
    with pytest.raises(RuntimeError, match="must match the size"):
        module(torch.ones(2), torch.ones(3))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (Op(name="aten.from_file.default"), r"aten\.from_file\.default is not allowed in a bundle"),
        (Op(name="aten.nothing.default"), "does not exist in torch"),
        (Op(name="operator.attrgetter"), "not allowed in a bundle"),
        (Op(name="torch.load"), "not allowed in a bundle"),
        (Op(name="higher_order.triton_kernel_wrapper_mutation"), "not allowed in a bundle"),
        (
            Op(name="mylib.thing.default"),
            r"namespace 'mylib', whose .* and pass --allow-ops mylib \(in Python allow_ops=\['mylib'\]\)",
        ),
        (Op(name="aten.add.Tensor", schema="aten::add.Tensor(Tensor self) -> Tensor"), "has the schema"),
        (Op(name="aten.add.Tensor", schema="not a schema ("), "has the schema"),
    ],
)
def test_operators_that_may_not_or_cannot_run_are_named(op: Op, message: str) -> None:
    with pytest.raises(OperatorError, match=message):
        resolve_operators([op], (), "stage-0.msgpack")


def test_an_older_schema_that_torch_still_accepts_is_accepted() -> None:
    older = Op(name="aten.add.Tensor", schema="aten::add.Tensor(Tensor self, Tensor other) -> Tensor")
    assert resolve_operators([older], (), "") == [torch.ops.aten.add.Tensor]


def test_sizes_cannot_grow_without_bound() -> None:
    dim: Expr | str = "n"
    for _ in range(60):
        dim = Expr(op="pow", args=(dim, 64))
    with pytest.raises(OverflowError, match="expected a size of at most"):
        evaluate_dim(dim, {"n": 2})


def test_every_dtype_of_the_format_is_torchs() -> None:
    for name, size in ITEM_SIZE.items():
        assert torch_attribute(name, torch.dtype).itemsize == size


def folded_calls(hole_texts: Sequence[tuple[str, ...]], *, inputs: Sequence[Value]) -> FoldedGraph:
    """A graph that calls one region, which adds two values, once for each of the texts."""
    node = Node(
        op=0, args=(ValueArg("{0}"), ValueArg("{1}")), outputs=(Value(name="{2}", dtype="float32", shape=(2,)),)
    )
    return FoldedGraph(
        inputs=tuple(inputs),
        nodes=tuple(RegionCall(0, texts) for texts in hole_texts),
        outputs=tuple(texts[2] for texts in hole_texts),
        ops=(ADD,),
        regions=(Region(nodes=(node,), scopes=(Scope(path=""),)),),
    )


@pytest.mark.parametrize(
    ("second", "is_kept"), [(("y", "x", "b"), True), (("x", "x", "b"), False), (("wide", "x", "b"), False)]
)
def test_a_region_whose_calls_differ_is_no_function(second: tuple[str, ...], is_kept: bool) -> None:
    values = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([10.0, 20.0]), "wide": torch.tensor(100.0)}
    inputs = [Value(name=name, dtype="float32", shape=tuple(tensor.shape)) for name, tensor in values.items()]
    folded = folded_calls([("x", "y", "a"), second], inputs=inputs)
    graph = unfold_graph(folded)
    functions = folded_functions(folded, graph)
    assert bool(functions.regions) == is_kept
    module = build_graph_module(functions, graph, resolve_operators(graph.ops, (), ""), CPU)
    first, other = module(*values.values())
    assert first.equal(values["x"] + values["y"])
    assert other.equal(values[second[0]] + values[second[1]])
