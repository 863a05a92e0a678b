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
from stagepack_loaders.generation.decoders import decoder_facts, logits_as_floats
from stagepack_loaders.generation.settings import read_settings
from stagepack_loaders.generation.token_loop import TokenLoop
from stagepack_loaders.pipeline_sequence import PipelineSequence

_MASK_INPUT = "attention_mask"

# Called with the new tokens of each text, [batch].
TokenCallback = Callable[[Array], object]


class GeneratingPipeline(Protocol):
    """What generation needs of a `CallablePipeline`, which imports this module."""

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
    decoder: GeneratingPipeline,
    inputs: Any,
    attention_mask: Any,
    *,
    encoder: GeneratingPipeline | None,
    on_tokens: TokenCallback | None,
    settings: Mapping[str, Any],
) -> Any:
    """Generate tokens; see `CallablePipeline.generate`.

    Args:
        decoder: the pipeline of a decoder.
        inputs: the tokens that are continued, or what the encoder reads.
        attention_mask: 1 for tokens and 0 for padding; None if there is no padding.
        encoder: the pipeline of the encoder; None for a decoder alone.
        on_tokens: called with the new tokens.
        settings: fields of `GenerationSettings`.

    Returns:
        All tokens of the decoder, as an array of the kind of `inputs`.

    Raises:
        InputError: the pipeline is no decoder of this kind, or the arguments do not fit it.
    """
    facts = decoder_facts(decoder.bundle.entry_point)
    if facts is None or facts.takes_encoder != (encoder is not None):
        expected = "a decoder with the inputs input_ids, cache_position and attention_mask"
        if facts is not None:
            expected = "encoder=, the pipeline of the encoder" if facts.takes_encoder else "no encoder="
        raise InputError(f"{decoder.bundle.location}: to generate, expected {expected}")
    chosen_settings = read_settings(decoder.bundle).override(settings)
    mask = None if attention_mask is None else _host_array(attention_mask)
    edges = {edge.name: edge for edge in decoder.inputs}
    with decoder.inference(), decoder.sequence() as sequence:
        if encoder is None:
            loop = TokenLoop(facts, chosen_settings, _host_array(inputs), mask)
        else:
            rows = encoder(**_encoder_inputs(encoder, inputs, mask))
            first_tokens = chosen_settings.first_tokens(len(rows))
            loop = TokenLoop(
                facts, chosen_settings, first_tokens, encoder_hidden_states=rows, encoder_attention_mask=mask
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
    return array_ops_of_call([inputs], decoder.arrays).from_elements(loop.tokens, edges["input_ids"])


def _encoder_inputs(encoder: GeneratingPipeline, inputs: Any, mask: Array | None) -> dict[str, Any]:
    """The inputs of an encoder by name: what it reads, and its mask if it takes one."""
    names = [edge.name for edge in encoder.inputs]
    encoder_inputs = {next(name for name in names if name != _MASK_INPUT): inputs}
    if _MASK_INPUT in names:
        encoder_inputs[_MASK_INPUT] = numpy.ones(inputs.shape, numpy.int64) if mask is None else mask
    return encoder_inputs


def _host_array(array: Any) -> Array:
    """An array of numbers of any runtime, or nested lists of them, as one of numpy."""
    return numpy.asarray(array.cpu() if hasattr(array, "cpu") else array)
