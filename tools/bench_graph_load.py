"""What the graph of a Llama of tiny weights takes: bytes, folded and not, and with more layers; and the time to get it ready to run.

Loading a bundle's graphs means: read, compare with the digest, check every rule, find the operators, compare the stated values with what
these return, build the fx modules. The other side is `torch.export.load` of the same program. Both are measured in this run, in turn; the
medians and their ratio are printed.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stagepack.capture.programs import Capture, capture_module
from stagepack.exporter import export_capture
from stagepack.format.folded_graph import trivially_folded
from stagepack.format.graph_codec import GraphFile, encode_graph
from stagepack.format.reader import Bundle
from stagepack.partition.cut_options import CutOptions
from stagepack_loaders.torch.build import build_graph_module
from stagepack_loaders.torch.resolved_operators import resolve_operators
from stagepack_loaders.torch.value_check import check_values
from tools.benchmark_models import llama, token_inputs
from tools.benchmark_results import BenchmarkResults, benchmark_parser, benchmark_results
from tools.measuring import medians, seconds_in_turns


def main() -> None:
    """Measure and print."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--more", type=int, default=80, help="layers of the model whose graph is compared in size")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, benchmark_results(options.json) as results:
        _measure(results, Path(folder), options)


def _measure(results: BenchmarkResults, folder: Path, options: argparse.Namespace) -> None:
    """Export one model both ways, and load both several times in turn."""
    capture, cut_options = _capture(options.layers), CutOptions(stages=options.stages)
    program_path = folder / "llama.pt2"
    torch.export.save(capture.program, program_path)
    bundle = export_capture(capture, out=folder / "llama.stagepack", cut_options=cut_options)
    larger = export_capture(_capture(options.more), out=folder / "more.stagepack", cut_options=cut_options)
    folded = _graph_bytes(bundle)
    unfolded = sum(len(encode_graph(trivially_folded(bundle.graph(stage)))) for stage in range(options.stages))
    node_count = sum(stage.nodes for stage in bundle.stages)
    stages = "one stage" if options.stages == 1 else f"{options.stages} stages"
    table = results.table(
        f"A Llama of {options.layers} layers and {node_count:,} nodes, {stages}", "measure", "value", "unit"
    )
    table.add("graphs, folded", folded, "bytes")
    table.add("graphs, unfolded", unfolded, "bytes")
    table.add("unfolded over folded", unfolded / folded, "")
    table.add(f"more with {options.more} layers", _graph_bytes(larger) - folded, "bytes")
    graphs = _resolved_graphs(bundle.path)
    sides = {
        "ours": lambda: _load_graphs(bundle.path),
        "checks": lambda: _check_values(graphs),
        "theirs": lambda: torch.export.load(program_path),
    }
    seconds = seconds_in_turns(sides, options.runs)
    ours, checks, theirs = medians(seconds).values()
    table.add("stagepack, graphs ready to run (median)", ours, "s")
    table.add("share of the comparison of values (rule G16)", checks / ours, "")
    table.add("torch.export.load (median)", theirs, "s")
    table.add("torch.export.load over stagepack", theirs / ours, "")
    runs = results.table("The runs, in turn", "loader", *(str(run) for run in range(1, options.runs + 1)))
    runs.add("stagepack, s", *seconds["ours"])
    runs.add("torch.export.load, s", *seconds["theirs"])


def _capture(layers: int) -> Capture:
    model = llama(layers=layers, hidden=32, intermediate=64, heads=4, kv_heads=2, vocab_size=128)
    return capture_module(model, token_inputs("input_ids", rows=2, length=8, longest=512, use_cache=False))


def _graph_bytes(bundle: Bundle) -> int:
    return sum(bundle.files[stage.graph].size for stage in bundle.stages)


def _load_graphs(path: Path) -> None:
    graphs = _resolved_graphs(path)
    _check_values(graphs)
    for loaded in graphs:
        build_graph_module(*loaded.file, loaded.operators, torch.device("cpu"))


class _ResolvedGraph(NamedTuple):
    name: str
    file: GraphFile
    operators: Sequence[Callable[..., Any]]


def _resolved_graphs(path: Path) -> list[_ResolvedGraph]:
    """The graph of each stage, read and checked, with its operators."""
    bundle = Bundle(path)
    resolved = []
    for number, stage in enumerate(bundle.stages):
        file = bundle.graph_file(number, module_calls=False)
        resolved.append(_ResolvedGraph(stage.graph, file, resolve_operators(file.graph.ops, (), stage.graph)))
    return resolved


def _check_values(graphs: Sequence[_ResolvedGraph]) -> None:
    for loaded in graphs:
        check_values(loaded.file.graph, loaded.operators, loaded.name)


if __name__ == "__main__":
    main()
