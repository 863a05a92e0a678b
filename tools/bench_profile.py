"""How even stages are on this machine when the cut is chosen by estimated times, and by times of `stagepack profile`.

Stages are measured as they run, one after another; the least of three medians counts, as other programs run too. The estimate assumes a
device on which matrix products are cheap; on a processor, other
operators count more.
"""

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import ResNetConfig, ResNetForImageClassification, T5Config, T5ForConditionalGeneration

import stagepack
from stagepack.cli.profile_command import make_profile
from stagepack_loaders.torch.measurement import measure_bundle
from tools import benchmark_models
from tools.benchmark_results import benchmark_parser, benchmark_results

Model = tuple[torch.nn.Module, dict[str, Any]]

_RUNS = 7
_PASSES = 3


def main() -> None:
    """Measure and print."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    torch.manual_seed(0)
    with benchmark_results(options.json) as results:
        table = results.table(
            "Measured: slowest stage over the mean of its cut",
            "model",
            "stages",
            "by estimates",
            "by a profile",
            "throughput by a profile over that by estimates",
        )
        for build in (resnet_50, llama, t5, sorted_features):
            for stage_count, by_estimate, by_profile in _compare_cuts(build, options.stages):
                balances = [max(times) / statistics.mean(times) for times in (by_estimate, by_profile)]
                table.add(build.__name__, stage_count, *balances, balances[0] / balances[1])


def _compare_cuts(build: Callable[[], Model], stage_counts: list[int]) -> list[tuple[int, list[float], list[float]]]:
    """The measured times of the stages of both cuts, in seconds, for each number of stages."""
    model, inputs = build()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bundle = stagepack.export(model, kwargs=inputs, out=Path(folder) / "whole.stagepack")
        profile = make_profile(bundle, measure_bundle(bundle, runs=_RUNS), _RUNS)
        for stage_count in stage_counts:
            cuts = [
                stagepack.recut(bundle, out=Path(folder) / name, stages=stage_count, profile=chosen, overwrite=True)
                for name, chosen in (("estimate.stagepack", None), ("profile.stagepack", profile))
            ]
            by_estimate, by_profile = map(_stage_seconds, cuts)
            rows.append((stage_count, by_estimate, by_profile))
    return rows


def _stage_seconds(cut: stagepack.Bundle) -> list[float]:
    """The time of each stage: the least of several medians."""
    passes = [[stage.seconds for stage in measure_bundle(cut, runs=_RUNS).stages] for _ in range(_PASSES)]
    return [min(times) for times in zip(*passes, strict=True)]


def resnet_50() -> Model:
    """A picture of 224 by 224."""
    return ResNetForImageClassification(ResNetConfig()).eval(), {"pixel_values": torch.randn(1, 3, 224, 224)}


def llama() -> Model:
    """8 layers, a vocabulary of 32,000, 64 tokens."""
    model = benchmark_models.llama(layers=8, hidden=512, intermediate=1408, heads=8, kv_heads=4)
    return model, {"input_ids": torch.ones(1, 64, dtype=torch.long), "use_cache": False}


def t5() -> Model:
    """T5 small: 6 layers in the encoder and 6 in the decoder, 64 tokens each."""
    config = T5Config(decoder_start_token_id=0)  # type: ignore[call-arg]
    tokens = torch.ones(1, 64, dtype=torch.long)
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens, "use_cache": False}
    return T5ForConditionalGeneration(config).eval(), inputs


class _SortedFeatures(torch.nn.Module):
    """Twelve layers on features that are sorted first: sorting is bound by memory in the estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sort(dim=-1).values
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x


def sorted_features() -> Model:
    """256 rows."""
    return _SortedFeatures().eval(), {"x": torch.randn(256, 1024)}


if __name__ == "__main__":
    main()
