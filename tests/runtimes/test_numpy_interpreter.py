"""What `run_nodes` does not run, `refuse_unsupported` refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import stagepack
from stagepack.errors import OperatorError
from stagepack_loaders.numpy_interpreter import Operators, refuse_unsupported, run_nodes
from tests.laws.function_model import Calls

X = torch.arange(6.0).reshape(2, 3)


class Written(torch.nn.Module):
    """Writes a buffer."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum(0))
        return x + self.total


def autocast(x: torch.Tensor) -> torch.Tensor:
    """Add in autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return x + x


def branches(x: torch.Tensor) -> torch.Tensor:
    """Choose a branch."""
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x + 2, (x,))


def bundle_of(module: torch.nn.Module, folder: Path) -> stagepack.Bundle:
    """A bundle of one stage."""
    return stagepack.export(module, (X,), out=folder / "m.stagepack")


class AnyOperator(dict[str, Callable[..., Any]]):
    """A table with a function for every operator of a graph."""

    def __init__(self, bundle: stagepack.Bundle) -> None:
        super().__init__({op.name: lambda *args, **kwargs: None for op in bundle.graph(0).ops})


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Written(), "does not write buffers"),
        (Calls(branches), "does not run subgraphs"),
        (Calls(autocast), "does not run nodes in a grad mode or autocast"),
        (Calls(lambda x: x.to(torch.float64) + 1), "does not run .* with a DtypeArg"),
        (Calls(lambda x: x.split(1)[0]), r"does not run aten\.split\.Tensor, which returns several values"),
    ],
)
def test_stages_that_it_cannot_run_are_refused(module: torch.nn.Module, says: str, tmp_path: Path) -> None:
    bundle = bundle_of(module, tmp_path)
    with pytest.raises(OperatorError, match=rf"stage 0: the test {says}.*: choose another runtime"):
        refuse_unsupported(bundle, 0, bundle.graph(0), AnyOperator(bundle), "the test")


def test_keyword_arguments_are_passed_or_refused(tmp_path: Path) -> None:
    bundle = bundle_of(Calls(lambda x: torch.add(x, x, alpha=3)), tmp_path)
    graph = bundle.graph(0)
    without_alpha: Operators = {"aten.add.Tensor": lambda self, other: self + other}
    with_alpha: Operators = {"aten.add.Tensor": lambda self, other, alpha=1: self + alpha * other}
    with pytest.raises(OperatorError, match=r"aten\.add\.Tensor with these arguments \(.*'alpha'\)"):
        refuse_unsupported(bundle, 0, graph, without_alpha, "the test")
    refuse_unsupported(bundle, 0, graph, with_alpha, "the test")
    (result,) = run_nodes(graph, with_alpha, {graph.inputs[0].name: X.numpy()})
    assert numpy.array_equal(result, 4 * X.numpy())


def test_lists_are_passed_and_results_have_the_stated_dtypes(tmp_path: Path) -> None:
    bundle = bundle_of(Calls(lambda x: torch.cat([x, x]) / 2), tmp_path)
    graph = bundle.graph(0)
    operators: Operators = {
        "aten.cat.default": lambda tensors, dim=0: numpy.concatenate(tensors, dim),
        "aten.div.Tensor": lambda self, other: self.astype("float64") / other,
    }
    refuse_unsupported(bundle, 0, graph, operators, "the test")
    (result,) = run_nodes(graph, operators, {graph.inputs[0].name: X.numpy()})
    assert result.dtype == numpy.float32
    assert numpy.array_equal(result, numpy.concatenate([X, X]) / 2)
