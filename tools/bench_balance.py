"""How even the stages are: the slowest stage over the mean, for our cut, equally many layers, and equally many parameters.

All three are cuts of the same graph between the same nodes, and all are held to the same costs (`stagepack plan`): compute, memory
traffic and what crosses. "Slower by" is the slowest stage of that cut over the slowest of ours.
"""

import bisect
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from stagepack.capture.inputs import Inputs
from stagepack.capture.programs import capture_program
from stagepack.format.graph import Graph
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.model_assembly import canonical_graph
from stagepack.linearize import linearize_program
from stagepack.partition.assignment import assign_consecutive, execution_order
from stagepack.partition.costs import graph_costs
from stagepack.partition.partitioner import plan_for_assignment
from stagepack.partition.recipes import CostedGraph
from stagepack.partition.solver import balance_stages
from tools.benchmark_models import llama_config, without_values
from tools.benchmark_results import benchmark_parser, benchmark_results
from tools.measuring import seconds_of

Model = tuple[PreTrainedModel, dict[str, Any], list[str]]


def main() -> None:
    """Measure and print."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args()
    with benchmark_results(options.json) as results:
        table = results.table(
            "Slowest stage over the mean, and the slowest stage of the other cut over ours",
            "model",
            "stages",
            "ours",
            "equal layers",
            "equal parameters",
            "slower by (equal layers)",
            "slower by (equal parameters)",
        )
        for build in (llama, resnet_50, t5):
            costed, layers = _graph(build())
            for stage_count in options.stages:
                table.add(build.__name__, stage_count, *_compare_cuts(costed, layers, stage_count))
        costed, _ = _graph(_llama(layers=78, hidden=64, intermediate=128, heads=4, kv_heads=2))
        seconds = seconds_of(lambda: balance_stages(costed, 16))
        results.table("Time to plan", "nodes", "stages", "seconds").add(f"{len(costed.graph.nodes):,}", 16, seconds)


def _compare_cuts(costed: CostedGraph, layers: Sequence[str], stage_count: int) -> list[float]:
    """The balance of three cuts, and how much slower than ours the slowest stage of the other two is."""
    cuts = (
        balance_stages(costed, stage_count),
        _by_layers(costed.graph, layers, stage_count),
        _by_parameters(costed, stage_count),
    )
    order = execution_order(costed.graph)
    plans = [plan_for_assignment(costed, assign_consecutive(order, cut)) for cut in cuts]
    stage_times = [[stage.time for stage in plan.stages] for plan in plans]
    balances = [max(times) / statistics.mean(times) for times in stage_times]
    return balances + [max(times) / max(stage_times[0]) for times in stage_times[1:]]


def llama() -> Model:
    """32 layers and a vocabulary of 128,256: the sizes of Llama 3.2 1B, with twice the layers."""
    return _llama(layers=32, hidden=2048, intermediate=8192, heads=32, kv_heads=8, vocab_size=128256)


def _llama(*, layers: int, **sizes: Any) -> Model:
    model = _empty(lambda: LlamaForCausalLM(llama_config(layers=layers, **sizes)))
    names = [f"model.layers.{layer_index}" for layer_index in range(layers)]
    return model, {"input_ids": _tokens(), "use_cache": False}, names


def resnet_50() -> Model:
    """Pictures of 224 by 224; its 16 blocks are the layers."""
    model = _empty(lambda: ResNetForImageClassification(ResNetConfig()))
    layers = [
        f"resnet.encoder.stages.{stage}.layers.{layer}"
        for stage, depth in enumerate((3, 4, 6, 3))
        for layer in range(depth)
    ]
    return model, {"pixel_values": torch.zeros(8, 3, 224, 224)}, layers


def t5() -> Model:
    """T5 base: 12 layers in the encoder, 12 in the decoder."""
    config = T5Config(  # type: ignore[call-arg]
        d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0
    )
    layers = [f"{side}.block.{block_index}" for side in ("encoder", "decoder") for block_index in range(12)]
    model_inputs = {"input_ids": _tokens(), "decoder_input_ids": _tokens(), "use_cache": False}
    return _empty(lambda: T5ForConditionalGeneration(config)), model_inputs, layers


def _empty(make_model: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    model: PreTrainedModel = without_values(lambda: make_model().bfloat16())
    return model.eval()


def _tokens() -> torch.Tensor:
    return torch.ones(4, 512, dtype=torch.long)


def _graph(built_model: Model) -> tuple[CostedGraph, list[str]]:
    model, model_inputs, layers = built_model
    if "pixel_values" in model_inputs:
        model_inputs["pixel_values"] = model_inputs["pixel_values"].to(model.dtype)
    linear = linearize_program(capture_program(torch.export.export(model, (), model_inputs), Inputs()))
    graph = canonical_graph(linear.graph)
    costs = graph_costs(graph, {weight_name: spec.nbytes for weight_name, (spec, _) in linear.weights.stored.items()})
    return CostedGraph(analysis=GraphAnalysis(graph), costs=costs), layers


def _by_layers(graph: Graph, layers: Sequence[str], stage_count: int) -> list[int]:
    """As many layers for each stage; what stands before the first and after the last goes with them."""
    first_nodes = [
        next(
            node_index
            for node_index, node in enumerate(graph.nodes)
            if f"{graph.scopes[node.scope].path}.".startswith(f"{layer}.")
        )
        for layer in layers
    ]
    return [first_nodes[len(layers) * stage_number // stage_count] for stage_number in range(1, stage_count)]


def _by_parameters(costed: CostedGraph, stage_count: int) -> list[int]:
    """As many bytes of weights for each stage, each weight where it is used first."""
    seen: set[str] = set()
    new_bytes = []
    weight_bytes = costed.costs.weight_bytes
    for input_names in costed.analysis.node_inputs:
        new_weights = {weight_name for weight_name in input_names if weight_name in weight_bytes} - seen
        seen |= new_weights
        new_bytes.append(sum(weight_bytes[weight_name] for weight_name in new_weights))
    bytes_so_far = list(itertools.accumulate(new_bytes))
    return [
        bisect.bisect_left(bytes_so_far, bytes_so_far[-1] * stage_number / stage_count) + 1
        for stage_number in range(1, stage_count)
    ]


if __name__ == "__main__":
    main()
