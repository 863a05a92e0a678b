"""Generate with a pipeline: its calls, driven by a `TokenLoop`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy

from stagepack.errors import InputError
from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack_loaders.base import ArrayOps
from stagepack_loaders.elements import Array
from stagepack_loaders.exchange import array_ops_of_call, to_elements
from stagepack_loaders.generation.decoders import DecoderFacts, decoder_facts, logits_as_floats
from stagepack_loaders.generation.prompts import Prompts, check_tokens, named_inputs, read_prompts
from stagepack_loaders.generation.settings import read_settings
from stagepack_loaders.generation.token_loop import TokenLoop
from stagepack_loaders.pipeline_sequence import PipelineSequence

_IDS_INPUT = "input_ids"
_MASK_INPUT = "attention_mask"

# Called with the new tokens of each text, [batch].
TokenCallback = Callable[[Array], object]


class TextPipeline(Protocol):
    """What generation and embedding need of a `CallablePipeline`, which imports this module."""

    @property
    def bundle(self) -> Bundle:
        """The bundle."""

    @property
    def inputs(self) -> Sequence[Edge]:
        """The inputs."""

    @property
    def arrays(self) -> ArrayOps:
        """The operations on its arrays."""

    def inference(self) -> AbstractContextManager[None]:
        """Return a context for calls that need no gradients."""

    def sequence(self) -> PipelineSequence:
        """Return the pipeline with state of its own."""

    def __call__(self, **inputs: Any) -> Any:
        """Call the pipeline."""


def generate(
    decoder: TextPipeline,
    inputs: Any,
    attention_mask: Any,
    *,
    encoder: TextPipeline | None,
    on_tokens: TokenCallback | None,
    settings: Mapping[str, Any],
) -> Any:
    """Generate tokens; see `CallablePipeline.generate`.

    encoder: the pipeline of the encoder; None for a decoder alone.
    """
    facts = decoder_facts(decoder.bundle.entry_point)
    if facts is None or facts.takes_encoder != (encoder is not None):
        expected = "a decoder with the inputs input_ids, cache_position and attention_mask"
        if facts is not None:
            expected = "encoder=, the pipeline of the encoder" if facts.takes_encoder else "no encoder="
        raise InputError(f"{decoder.bundle.location}: to generate, expected {expected}")
    inputs, attention_mask, settings = named_inputs(inputs, attention_mask, settings)
    chosen_settings = read_settings(decoder.bundle).override(settings)
    prompts = read_prompts(decoder.bundle, inputs, attention_mask, chosen_settings, continues=encoder is None)
    edges = {edge.name: edge for edge in decoder.inputs}
    vocabulary_size = facts.logits.shape[-1]
    if encoder is None and isinstance(vocabulary_size, int):
        check_tokens(decoder.bundle, prompts, vocabulary_size)
    _check_batch(prompts.tokens, edges[_IDS_INPUT] if encoder is None else _main_input(encoder), facts)
    with decoder.inference(), decoder.sequence() as sequence:
        if encoder is None:
            loop = TokenLoop(facts, chosen_settings, prompts.tokens, prompts.mask)
        else:
            rows = encoder(**_encoder_inputs(encoder, inputs, prompts))
            first_tokens = chosen_settings.first_tokens(len(rows))
            loop = TokenLoop(
                facts, chosen_settings, first_tokens, encoder_hidden_states=rows, encoder_attention_mask=prompts.mask
            )
        while not loop.is_finished:
            call_inputs = {
                name: decoder.arrays.from_elements(value, edges[name]) if isinstance(value, numpy.ndarray) else value
                for name, value in loop.next_inputs().items()
            }
            logits = sequence(**call_inputs)
            new_tokens = loop.take(logits_as_floats(to_elements(logits, facts.logits), facts.logits))
            if on_tokens is not None:
                on_tokens(new_tokens)
    if prompts.tokenizer is not None:
        return prompts.texts(loop.tokens)
    tokens = array_ops_of_call([inputs], decoder.arrays).from_elements(loop.tokens, edges[_IDS_INPUT])
    # A tensor of torch is on the device of that of the caller.
    return tokens.to(inputs.device) if hasattr(tokens, "to") and hasattr(inputs, "device") else tokens


def _check_batch(tokens: Array, edge: Edge, facts: DecoderFacts) -> None:
    """Check that the cache holds all texts; what has another rank than the input is left to the call, which names it."""
    largest = facts.max_batch
    if largest is not None and 0 < tokens.ndim == len(edge.shape) and len(tokens) > largest:
        count = len(tokens)
        expected = "1 text" if largest == 1 else f"1 to {largest} texts"
        advice = f"export again with --generate-batch {count} (in Python generate_batch={count})"
        raise InputError(f"{edge.name}: expected {expected}, found {count}: {advice}")


def _main_input(encoder: TextPipeline) -> Edge:
    """What an encoder reads, beside its mask."""
    return next(edge for edge in encoder.inputs if edge.name != _MASK_INPUT)


def _encoder_inputs(encoder: TextPipeline, inputs: Any, prompts: Prompts) -> dict[str, Any]:
    """The inputs of an encoder by name: what it reads, and its mask if it takes one."""
    names = [edge.name for edge in encoder.inputs]
    # As the caller gave it, where that is an array of the batch: it may be on a device.
    is_batch = tuple(getattr(inputs, "shape", ())) == prompts.tokens.shape
    encoder_inputs = {_main_input(encoder).name: inputs if is_batch else prompts.tokens}
    if _MASK_INPUT in names:
        ones = numpy.ones(prompts.tokens.shape, numpy.int64)
        encoder_inputs[_MASK_INPUT] = ones if prompts.mask is None else prompts.mask
    return encoder_inputs
