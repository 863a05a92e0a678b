"""Bytes that cross between stages in one call: our cut, and that of `torch.distributed.pipelining` before the same layers.

Both sides cut the same model in this run, at each sequence length. An entry is what one stage receives from the stages before it;
inputs of the model are not counted, since the caller gives them to whichever stage wants them.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from stagepack.capture.inputs import Inputs
from stagepack.capture.source import capture_source
from stagepack.exporter import plan_capture
from stagepack.format.graph import value_bytes
from stagepack.format.shapes import evaluate_dim, example_sizes
from stagepack.partition.cut_options import CutOptions
from tools import benchmark_models, pipelining
from tools.benchmark_results import ResultTable, benchmark_parser, benchmark_results

_LAYERS = 6
_LONGEST = 8192
Model = tuple[Any, Inputs, list[str]]


def main() -> None:
    """Measure and print."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    options = parser.parse_args()
    with benchmark_results(options.json) as results:
        table = results.table(
            "Bytes that a stage receives from the stages before it, in one call",
            "model",
            "sequence",
            "stage",
            "stagepack",
            "torch.distributed.pipelining",
            "hidden state",
            "what crosses in stagepack's cut",
        )
        for build in (llama, bert, t5):
            for length in options.lengths:
                _compare(table, build, length)


def llama(length: int) -> Model:
    """Six layers, cut before the third and the fifth."""
    model = benchmark_models.llama(
        layers=_LAYERS,
        hidden=256,
        intermediate=512,
        heads=4,
        kv_heads=2,
        vocab_size=1000,
        max_position_embeddings=_LONGEST,
    )
    return model, _tokens(length, "input_ids", use_cache=False), ["model.layers.2", "model.layers.4"]


def bert(length: int) -> Model:
    """Six layers and an attention mask, cut before the third and the fifth."""
    config = BertConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_hidden_layers=_LAYERS,
        max_position_embeddings=_LONGEST,
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    return model, _tokens(length, "input_ids", "attention_mask"), ["encoder.layer.2", "encoder.layer.4"]


def t5(length: int) -> Model:
    """Four layers each in the encoder and the decoder, cut in the middle of the one, between them, and in the middle of the other."""
    config = T5Config(  # type: ignore[call-arg]
        vocab_size=1000, d_model=256, d_kv=64, d_ff=512, num_heads=4, num_layers=4, decoder_start_token_id=0
    )
    split_modules = ["encoder.block.2", "decoder.block.0", "decoder.block.2"]
    inputs = _tokens(length, "input_ids", "decoder_input_ids", use_cache=False)
    return T5ForConditionalGeneration(config).eval(), inputs, split_modules


def _tokens(length: int, *names: str, **more: bool) -> Inputs:
    return benchmark_models.token_inputs(*names, rows=2, length=length, longest=_LONGEST, **more)


def _compare(table: ResultTable, build: Callable[[int], Model], length: int) -> None:
    """Add a row for each stage of a model but the first."""
    torch.manual_seed(0)
    model, inputs, split_modules = build(length)
    partition, symbols = plan_capture(capture_source(model, inputs), CutOptions(split_at=split_modules))
    sizes = example_sizes(symbols)
    theirs = pipelining.sent_bytes(pipelining.cut(model, inputs, pipelining.at_modules(split_modules)))
    hidden = 2 * length * model.config.hidden_size * 4
    for stage, received in enumerate(theirs, start=1):
        crossing = [edge for edge in partition.cut.edges if edge.producer is not None and stage in edge.consumers]
        ours = sum(value_bytes(edge, sizes) for edge in crossing)
        shapes = ", ".join(f"{edge.dtype}{[evaluate_dim(dim, sizes) for dim in edge.shape]}" for edge in crossing)
        table.add(build.__name__, length, stage, ours, received, hidden, shapes)
        assert ours <= received, "more bytes cross than in the cut of torch.distributed.pipelining"


if __name__ == "__main__":
    main()
