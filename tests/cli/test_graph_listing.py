"""`inspect --graph`: a graph as code that reads as Python."""

import ast
import functools
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.cli.graph_listing import graph_lines
from stagepack.format.folded_graph import trivially_folded
from stagepack.format.graph import FoldedGraph, Region
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from tests.hostile.attack import run
from tests.modules import module_of
from tests.zoo.case import Case, stages_at_most
from tests.zoo.cases import named
from tests.zoo.test_zoo import name_of, slow

MODELS = [
    *named("regions-branches-and-loops", "operators-text-arguments", "values-odd-constants", "values-identity"),
    *slow(
        named(
            "regions-regions",
            "operators-factories-with-a-device",
            "values-no-weights",
            "shapes-arithmetic-on-sizes",
            "state-cache-by-index-copy",
            "decoders-llama",
        )
    ),
]


@pytest.mark.parametrize("case", MODELS, ids=name_of)
def test_it_reads_as_python_and_has_every_node(case: Case, tmp_path: Path) -> None:
    capture = case.capture()
    cut_options = CutOptions(stages=stages_at_most(2, capture))
    bundle = export_capture(capture, out=tmp_path / "m.stagepack", cut_options=cut_options)
    for stage_number in range(len(bundle.stages)):
        folded, graph = bundle.graph_file(stage_number)
        subgraphs = [f"subgraph_{index}" for index in range(len(graph.subgraphs))]
        flat = functions(graph_lines(trivially_folded(graph), graph, f"stage_{stage_number}"))
        assert list(flat) == [*subgraphs, f"stage_{stage_number}"]
        assert lines(flat[f"stage_{stage_number}"]) == len(graph.nodes)
        folded_functions = functions(graph_lines(folded, graph, f"stage_{stage_number}"))
        regions = [f"region_{index}" for index in range(len(folded.regions))]
        assert list(folded_functions) == [*subgraphs, *regions, f"stage_{stage_number}"]
        bodies: list[tuple[str, Region | FoldedGraph]] = [
            *zip(regions, folded.regions, strict=True),
            (f"stage_{stage_number}", folded),
        ]
        assert all(lines(folded_functions[function_name]) == len(body.nodes) for function_name, body in bodies)


def functions(printed: Iterable[str]) -> dict[str, ast.FunctionDef]:
    body = ast.parse("\n".join(printed)).body
    return {function.name: function for function in body if isinstance(function, ast.FunctionDef)}


def lines(function: ast.FunctionDef) -> int:
    """How many calls stand in a function."""
    return len([node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.Expr)])


def test_the_command_prints_one_stage_or_all(sound: Path) -> None:
    bundle = stagepack.open(sound)
    one_stage = run("inspect", str(sound), "--graph", "--stage", "1").stdout
    assert one_stage.splitlines()[:-1] == list(graph_lines(*bundle.graph_file(1), "stage_1"))
    assert (
        "    # first (torch.nn.modules.linear.Linear)\n    linear_1 = aten.linear.default(embedding_0, weights['first.weight']"
        in one_stage
    )
    all_stages = run("inspect", str(sound), "--graph").stdout
    expected = ["def stage_0(", "def stage_1(", "def stage_2("]
    assert [line for line in all_stages.splitlines() if line.startswith("def ")] == expected
    assert one_stage in all_stages


def test_names_with_braces_are_written_as_python_reads_them(tmp_path: Path) -> None:
    layers = torch.nn.ModuleDict(
        {
            f"k{{0}}{layer_number}": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.LayerNorm(4))
            for layer_number in range(12)
        }
    )
    model = module_of(
        lambda self, x: functools.reduce(lambda y, layer: layer(y), self.layers.values(), x), layers=layers
    )
    bundle = stagepack.export(model, (torch.randn(2, 4),), out=tmp_path / "m.stagepack")
    printed = "\n".join(graph_lines(*bundle.graph_file(0), "stage_0"))
    [weight_name] = set(re.findall(r"weights\[(f'.*?\.0\.weight')\]", printed))
    at = re.search(r"\{(at\d+)\}", weight_name)
    assert at
    assert eval(weight_name, {at[1]: 5}) == "layers.k{0}5.0.weight"  # noqa: S307 - ours
