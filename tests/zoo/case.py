"""A model of the zoo, and the answers that it must keep giving."""

import copy
import pkgutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from stagepack.capture.inputs import Inputs
from stagepack.capture.model_runs import preserve_module
from stagepack.capture.programs import Capture
from stagepack.capture.source import capture_model
from stagepack.format.graph import Graph
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.model_assembly import canonical_graph
from stagepack.linearize import linearize_program
from stagepack.partition.assignment import late_state_order
from stagepack.partition.costs import graph_costs
from stagepack.partition.recipes import CostedGraph
from stagepack.partition.solver import cost_sequence

Build = Callable[[], tuple[torch.nn.Module, Inputs]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model to export."""

    name: str
    row: str  # of `docs/coverage.md`
    # Makes the model with its example inputs, always with the same random weights.
    build: Build
    # The module that registers the custom operators it uses; their namespace is its package.
    operators: str = ""
    # Classes that its results are built of, those of transformers by name, ``module:class``.
    types: Collection[type | str] = field(default=())
    # The oldest version of torch that captures it as it is; empty for all that are supported.
    oldest_torch: str = ""

    @property
    def is_supported(self) -> bool:
        """Whether this torch captures the model as it is."""
        return not self.oldest_torch or Version(torch.__version__) >= Version(self.oldest_torch)

    def capture(self) -> Capture:
        """Build and capture the model. Skips the test where torch is too old."""
        if not self.is_supported:
            pytest.skip(f"torch {torch.__version__} does not capture {self.name}: needs {self.oldest_torch}")
        torch.manual_seed(0)
        return capture_model(*self.build())

    def classes(self) -> list[type]:
        """The classes of `types`."""
        return [pkgutil.resolve_name(cls) if isinstance(cls, str) else cls for cls in self.types]


def stages_at_most(stages: int, capture: Capture) -> int:
    """A number of stages; if a model cannot be cut into as many, the most that it can be cut into."""
    return min(stages, most_stages(canonical_graph(linearize_program(capture).graph)))


def most_stages(graph: Graph) -> int:
    """How many stages the graph of a whole model can be cut into."""
    costs = graph_costs(graph, {weight.stored: 0 for weight in graph.weights})
    costed = CostedGraph(analysis=GraphAnalysis(graph), costs=costs)
    return 1 + len(cost_sequence(costed, late_state_order(costed.analysis)).split_positions)


def answers(run: Callable[..., Any], calls: list[Inputs]) -> list[list[Any]]:
    """The leaves of the answers of one module to several calls in a row, with those of the inputs after each call.

    Calls with the same `Inputs` get the same tensors, so that what a model writes into them adds up.
    """
    given = {id(inputs): copy.deepcopy((tuple(inputs.args), dict(inputs.kwargs))) for inputs in calls}
    found = []
    for inputs in calls:
        args, kwargs = given[id(inputs)]
        torch.manual_seed(0)
        with torch.no_grad():
            result = run(*args, **kwargs)
        leaves = pytree.tree_leaves((result, args, kwargs))
        found.append([copy.deepcopy(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf) for leaf in leaves])
    return found


def captured_answers(capture: Capture, calls: list[Inputs]) -> list[list[Any]]:
    """What the captured program answers; its state is put back."""
    module, program = capture.program.module(), capture.program
    held = (*program.state_dict.values(), *program.constants.values())
    with preserve_module(module, [tensor for tensor in held if type(tensor) in (torch.Tensor, torch.nn.Parameter)]):
        return answers(module, calls)


def other_size(program: ExportedProgram, inputs: Inputs, growth: int = 3) -> Inputs:
    """Inputs like the example's, with each dynamic dimension larger by at least `growth`; the example itself where there is none."""
    leaves, spec = pytree.tree_flatten((tuple(inputs.args), dict(inputs.kwargs)))
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"][-len(leaves) :] if leaves else []
    sizes: dict[Any, int] = {}

    def size(dim: Any) -> int:
        if isinstance(dim, int):
            return dim
        for symbol in dim.node.expr.free_symbols:
            sizes.setdefault(symbol, int(dim.node.shape_env.backed_var_to_val[symbol]) + growth + len(sizes))
        return int(dim.node.expr.subs(sizes))

    def like(given: Any, node: torch.fx.Node) -> Any:
        if not isinstance(given, torch.Tensor):
            return given
        shape = [size(dim) for dim in node.meta["val"].shape]
        if shape == list(given.shape):
            return given
        if given.is_floating_point():
            return torch.randn(shape).to(given.dtype)
        return torch.randint(int(given.min()), int(given.max()) + 1, shape).to(given.dtype)

    others = [like(given, node) for given, node in zip(leaves, placeholders, strict=True)]
    if all(other is given for other, given in zip(others, leaves, strict=True)):
        return inputs
    args, kwargs = pytree.tree_unflatten(others, spec)
    return Inputs(args=args, kwargs=kwargs)


def files(folder: Path) -> dict[str, bytes]:
    """The content of the files of a bundle."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_equal(found: list[list[Any]], expected: list[list[Any]]) -> None:
    """Assert that answers are the same bit for bit."""
    for call, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for leaf, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            where = f"call {call}, leaf {leaf}"
            assert type(mine) is type(other), where
            if isinstance(mine, torch.Tensor):
                assert (mine.dtype, mine.shape) == (other.dtype, other.shape), where
                assert mine.stride() == other.stride(), where
                assert torch.allclose(mine, other, rtol=0, atol=0, equal_nan=True), where
            else:
                assert mine == other, where
