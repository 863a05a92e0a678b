"""No operator is free: each is counted, has a formula, is known to be bound by memory, or is estimated."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import stagepack
from stagepack.capture.inputs import Inputs
from stagepack.capture.source import capture_model
from stagepack.format.graph import Graph
from stagepack.format.operators import is_denied_operator
from stagepack.linearize import linearize_program
from stagepack.partition.costs import estimated_operators
from stagepack.partition.flop_formulas import FLOP_FORMULAS, OperatorCall, TensorShape, estimated_flops
from stagepack.partition.operator_costs import (
    FREE_OPERATORS,
    MEMORY_BOUND_OPERATORS,
    TORCH_COUNTED_OPERATORS,
    cost_source,
    operator_base_name,
)


def graph_of(model: nn.Module, *args: Any) -> Graph:
    return linearize_program(capture_model(model, Inputs(args=args))).graph


def flops_of(model: nn.Module, *args: Any) -> int:
    return sum(node.cost.flops for node in graph_of(model, *args).nodes)


def overloads() -> Iterator[torch._ops.OpOverload]:
    """The ATen operators of this torch that a bundle may hold."""
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        base, _, overload = name.partition(".")
        if namespace == "aten" and hasattr(torch.ops.aten, base):
            found = getattr(getattr(torch.ops.aten, base), overload or "default", None)
            if found is not None and not is_denied_operator(str(found)) and not base.startswith("_test"):
                yield found


def test_the_tables_have_what_torch_says_is_a_view_or_elementwise_or_a_reduction() -> None:
    wrong = {}
    for operator in overloads():
        kinds = set(operator.tags) & {torch.Tag.pointwise, getattr(torch.Tag, "reduction", torch.Tag.pointwise)}
        expected = "free" if operator.is_view else "memory" if kinds else None
        if expected not in (None, cost_source(str(operator))) and "backward" not in str(operator):
            wrong[str(operator)] = cost_source(str(operator))
    assert wrong == {}


def test_the_names_of_the_tables_are_names_of_torch() -> None:
    """A few may be missing: torch adds and removes operators."""
    known = {operator_base_name(str(operator)) for operator in overloads()}
    tables = FREE_OPERATORS | MEMORY_BOUND_OPERATORS | TORCH_COUNTED_OPERATORS | FLOP_FORMULAS.keys()
    listed = {name for name in tables if name.startswith("aten.")}
    assert len(listed - known) < 20, sorted(listed - known)


def test_no_operator_is_in_two_tables() -> None:
    tables = [FREE_OPERATORS, MEMORY_BOUND_OPERATORS, TORCH_COUNTED_OPERATORS, frozenset(FLOP_FORMULAS)]
    assert sum(map(len, tables)) == len(frozenset().union(*tables))


def test_each_formula_finds_its_parameters_in_each_overload() -> None:
    found = set()
    for operator in overloads():
        name = operator_base_name(str(operator))
        if name not in FLOP_FORMULAS or str(operator).endswith("out"):
            continue
        arguments = {
            parameter.name: _stand_in(str(parameter.type), parameter.default_value)
            for parameter in operator._schema.arguments
        }
        results = [TensorShape(sizes=(2, 8, 8))] * len(operator._schema.returns)
        assert FLOP_FORMULAS[name](OperatorCall(arguments=arguments, results=results)) > 0, operator
        found.add(name)
    assert len(found) > 100


def _stand_in(kind: str, default: Any) -> Any:
    if kind == "Tensor":
        return TensorShape(sizes=(2, 8, 8))
    if kind == "List[Tensor]" or "CellParamsBase" in kind:
        return [TensorShape(sizes=(8, 8))]
    return [1] if kind == "List[int]" else 8 if kind == "int" and default is None else default


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (nn.LSTM(8, 16, num_layers=2), (5, 3, 8)),
        (nn.LSTM(8, 16, bidirectional=True, batch_first=True), (3, 5, 8)),
        (nn.LSTM(8, 16, proj_size=4), (5, 3, 8)),
        (nn.GRU(8, 16), (5, 3, 8)),
        (nn.RNN(8, 16), (5, 3, 8)),
        (nn.RNN(8, 16, nonlinearity="relu"), (5, 8)),
        (nn.LSTMCell(8, 16), (3, 8)),
        (nn.GRUCell(8, 16), (3, 8)),
        (nn.RNNCell(8, 16), (3, 8)),
        (nn.Conv1d(4, 6, 3, padding="same"), (2, 4, 10)),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, nn.Module) else "x".join(map(str, given)),
)
def test_layers_cost_what_torch_counts_once_it_has_decomposed_them(model: nn.Module, sizes: tuple[int, ...]) -> None:
    example = torch.randn(sizes)
    graph = graph_of(model, example)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.to("meta")(example.to("meta"))  # on the CPU, layers of oneDNN would be called, which are not decomposed
    products = {
        node.op: node.cost.flops
        for node in graph.nodes
        if operator_base_name(graph.ops[node.op].name) in FLOP_FORMULAS.keys() | TORCH_COUNTED_OPERATORS
    }
    assert sum(products.values()) == counter.get_total_flops() > 0


@pytest.mark.parametrize("has_projection", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_recurrent_layers_read_their_hidden_weights_for_each_step(has_bias: bool, has_projection: bool) -> None:
    size = 4 if has_projection else 16
    model = nn.LSTM(8, 16, num_layers=2, bidirectional=True, bias=has_bias, proj_size=4 if has_projection else 0)
    costs = []
    for steps in (5, 6):
        graph = graph_of(model, torch.randn(steps, 3, 8))
        costs += [node.cost.bytes for node in graph.nodes if graph.ops[node.op].name == "aten.lstm.input"]
    hidden = sum(weight.numel() for name, weight in model.named_parameters() if "_hh_" in name or "_hr_" in name)
    biases = sum(weight.numel() for name, weight in model.named_parameters() if "bias_hh" in name)
    assert costs[1] - costs[0] == 4 * (hidden - biases + 3 * (8 + 2 * size))


class Lambda(nn.Module):
    def __init__(self, function: Callable[..., Any], *weights: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.matrices = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)

    def forward(self, *args: Any) -> Any:
        return self.function(*args, *self.matrices)


INTEGERS = torch.ones(32, 16, dtype=torch.int8)


@pytest.mark.parametrize(
    ("function", "args", "flops"),
    [
        (torch._int_mm, (INTEGERS, INTEGERS.T.contiguous()), 2 * 32 * 16 * 32),
        (torch.mv, (torch.randn(5, 7), torch.randn(7)), 2 * 5 * 7),
        (torch.dot, (torch.randn(7), torch.randn(7)), 2 * 7),
        (torch.inner, (torch.randn(5, 7), torch.randn(3, 7)), 2 * 5 * 3 * 7),
        (torch.addbmm, (torch.randn(5, 3), torch.randn(4, 5, 7), torch.randn(4, 7, 3)), 2 * 4 * 5 * 7 * 3),
        (torch.cdist, (torch.randn(5, 7), torch.randn(3, 7)), 3 * 5 * 3 * 7),
        (torch.fft.fft, (torch.randn(4, 8, dtype=torch.complex64),), 5 * 32 * 3),
        (torch.fft.rfft, (torch.randn(4, 8),), 5 * 32 * 3 // 2),
        (torch.fft.irfftn, (torch.randn(4, 5, dtype=torch.complex64),), 5 * 32 * 5 // 2),
        (torch.linalg.inv, (torch.eye(6),), 2 * 6**3),
        (torch.linalg.solve, (torch.eye(6), torch.randn(6, 2)), 2 * 6**3 // 3 + 2 * 6 * 6 * 2),
        (torch.linalg.cholesky, (torch.eye(6).expand(3, 6, 6),), 3 * 6**3 // 3),
        (torch.linalg.matrix_power, (torch.eye(6), 5), 2 * 6**3 * 3),
    ],
    ids=lambda given: given.__name__ if callable(given) else "",
)
def test_products_transforms_and_linear_algebra_are_counted(
    function: Callable[..., Any], args: tuple[Any, ...], flops: int
) -> None:
    tensors = tuple(arg for arg in args if isinstance(arg, torch.Tensor))
    assert flops_of(Lambda(lambda *given: function(*given, *args[len(tensors) :])), *tensors) == flops


def test_a_loop_of_known_length_costs_its_body_as_often() -> None:
    def scan(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        def step(carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            after = torch.mv(weight, carry) + row
            return after, after.clone()

        from torch._higher_order_ops.scan import scan

        return scan(step, rows[0], rows)[1]

    assert flops_of(Lambda(scan, torch.randn(6, 6)), torch.randn(7, 6)) >= 7 * 2 * 6 * 6


def test_an_operator_without_a_formula_meets_its_weights_with_every_row() -> None:
    rows, weight = TensorShape(sizes=(2, 3, 8)), TensorShape(sizes=(8, 16), is_weight=True)
    experts = TensorShape(sizes=(4, 8, 16), is_weight=True)
    indices = TensorShape(sizes=(2, 3), is_multiplied=False)
    result = [TensorShape(sizes=(2, 3, 16))]
    assert estimated_flops(OperatorCall(arguments={"x": rows, "w": [weight]}, results=result)) == 2 * 6 * 8 * 16
    assert estimated_flops(OperatorCall(arguments={"x": rows, "w": experts}, results=result)) == 2 * 6 * 8 * 16
    assert estimated_flops(OperatorCall(arguments={"ids": indices, "w": weight}, results=result)) == 2 * 3 * 16


def test_custom_operators_are_estimated_and_named() -> None:
    @torch.library.custom_op("costs_test::layer", mutates_args=())
    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight

    layer.register_fake(lambda x, weight: x @ weight)
    graph = graph_of(Lambda(layer, torch.randn(8, 16)), torch.randn(3, 8))
    assert [node.cost.flops for node in graph.nodes] == [2 * 3 * 8 * 16]
    assert estimated_operators([graph, graph]) == {"costs_test.layer.default": 2}


def test_sizes_that_depend_on_data_may_be_too_small_to_count_with(tmp_path: Path) -> None:
    """The sizes count as 1, which is less than the kernel."""

    class Found(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv1d(1, 2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            where = x.nonzero().squeeze(1)
            torch._check(where.shape[0] >= 5)
            found: torch.Tensor = self.layer(x[where][None, None])
            return found

    bundle = stagepack.export(Found(), (torch.ones(9),), out=tmp_path / "found.stagepack")
    assert stagepack.load(bundle)(torch.ones(9)).shape == (1, 2, 7)


class Recurrent(nn.Module):
    """Four recurrent layers of equal cost, after a linear layer that is cheap."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 640)
        self.layers = nn.ModuleList(nn.LSTM(640, 640, batch_first=True) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


@pytest.mark.parametrize("stage_count", [2, 4])
def test_four_recurrent_layers_are_balanced_in_the_plan_and_by_the_clock(stage_count: int, tmp_path: Path) -> None:
    example = torch.randn(4, 16, 16)
    model = Recurrent().eval()
    bundle = stagepack.export(model, (example,), out=tmp_path / "lstm.stagepack", stages=stage_count)
    plan = bundle.entry_point.plan
    assert plan is not None
    planned = [stage.time for stage in plan.stages]
    assert max(planned) / (sum(planned) / stage_count) < 1.3
    layers = [
        sum(graph.ops[node.op].name.startswith("aten.lstm") for node in graph.nodes)
        for graph in map(bundle.graph, range(stage_count))
    ]
    assert layers == [4 // stage_count] * stage_count
    stages = stagepack.load(bundle).stages
    times = [min(_stage_times(stages, example)[stage] for _ in range(3)) for stage in range(stage_count)]
    assert max(times) / (sum(times) / stage_count) < 1.6


def _stage_times(stages: Any, example: torch.Tensor) -> list[float]:
    """Seconds of the processor that each stage takes for one call of all of them, in order; other processes do not count."""
    seconds, values = [], [example]
    for stage in stages:
        started = time.thread_time()
        with torch.no_grad():
            values = list(stage.run(values))
        seconds.append(time.thread_time() - started)
    return seconds
