"""The graph that applies an adapter: its operators, its rules, and the uses of a weight that it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.adapter.document import LowRankChange
from stagepack.adapter.rewrite import OPERATORS, Pair, change_graph, without_rows
from stagepack.adapter.uses import find_uses, unused_changes
from stagepack.errors import AdapterError
from stagepack.format.folded_graph import unfold_graph
from stagepack.format.operators import RUN_BY_DEFAULT, operator_verdict
from stagepack.format.validate.graph_rules import check_graph
from stagepack.graph.folding import fold_graph
from stagepack.linearize.op_tables import op_row
from stagepack_loaders.torch.resolved_operators import resolve_operators
from stagepack_loaders.torch.value_check import check_graph_values


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_the_operators_are_those_of_torch(op: Any) -> None:
    namespace, name, overload = op.name.split(".")
    assert op_row(getattr(getattr(getattr(torch.ops, namespace), name), overload)) == op
    assert operator_verdict(op.name) in RUN_BY_DEFAULT


class Layers(torch.nn.Module):
    """Equal layers, which are one region."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(6)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x


def change(module: str) -> LowRankChange:
    return LowRankChange(module=module, weight=f"{module}.weight", scale=2.0)


def batch_shapes() -> dict[str, Any]:
    return {"ids": {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=32)}}


@pytest.fixture
def graph(tmp_path: Path) -> Any:
    torch.manual_seed(0)
    example = (torch.ones(2, 5, dtype=torch.int64),)
    bundle = stagepack.export(Layers().eval(), example, out=tmp_path / "m.stagepack", dynamic_shapes=batch_shapes())
    return bundle.graph(0)


@pytest.mark.parametrize("batch", [None, "batch"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_changed_graph_satisfies_the_rules_and_folds(graph: Any, batch: str | None, has_bias: bool) -> None:
    changes = {f"layers.{number}": change(f"layers.{number}") for number in range(6)} | {"table": change("table")}
    pairs = {module: Pair(3, has_bias and module != "table") for module in changes}
    uses = find_uses(graph, changes)
    changed = change_graph(graph, uses, pairs, batch)
    assert list(check_graph(changed.graph, "changed")) == []
    check_graph_values(changed.graph, resolve_operators(changed.graph.ops, (), "changed"), "changed")
    assert [use.change.module for use in uses] == ["table", *(f"layers.{number}" for number in range(6))]
    assert changed.graph.outputs == graph.outputs
    assert changed.graph.weights == graph.weights
    assert len(changed.graph.inputs) == len(graph.inputs) + len(changed.inputs)
    folded = fold_graph(changed.graph)
    assert unfold_graph(folded) == changed.graph
    # The layers are one region, as they were, so that the graph is built and compiled once for all.
    assert folded.regions
    assert len(folded.nodes) <= len(changed.graph.nodes) / 2
    assert without_rows(graph, uses, "batch") == []


def test_a_graph_without_the_weights_stays_as_it_is(graph: Any) -> None:
    assert find_uses(graph, {"other": change("other")}) == []
    changed = change_graph(graph, (), {})
    assert changed.inputs == ()
    assert (changed.graph.nodes, changed.graph.inputs) == (graph.nodes, graph.inputs)


class Uses(torch.nn.Module):
    """Uses of weights in another way than a layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.cast, self.read = Scaled(), Cast(), Read()
        self.table = torch.nn.Embedding(4, 8)
        self.tied = torch.nn.Linear(8, 4, bias=False)
        self.tied.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.read(self.cast(self.scaled(x)))
        return torch.nn.functional.linear(x, self.table.weight)


class Scaled(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


class Cast(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(torch.sin(x), self.weight, self.bias)


class Read(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[0]


def test_a_module_that_does_more_than_its_product_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    bundle = stagepack.export(Uses().eval(), (torch.randn(2, 8),), out=tmp_path / "m.stagepack")
    graph = bundle.graph(0)
    for module, says in (
        ("scaled", r"scaled: computes aten\.mul\.Tensor behind its weight: merge it"),
        ("cast", r"cast: computes aten\.sin\.default before its weight: merge it"),
        ("read", r"read: the weight read\.weight is used by aten\.\w+\.\w+, expected a linear layer"),
    ):
        with pytest.raises(AdapterError, match=says):
            find_uses(graph, {module: change(module)})
    table = LowRankChange(module="table", weight="table.weight", scale=1.0)
    assert unused_changes([graph], {"table": table}) == {"table": "its weight is used by the model itself"}
