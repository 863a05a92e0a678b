"""Generate with a pipeline, in the thread of the caller."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy
from msgspec.structs import replace

from stagepack.adapter.adapted_bundle import AdaptedBundle
from stagepack.errors import InputError
from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack_loaders.base import ArrayOps
from stagepack_loaders.decoders import DecoderFacts, decoder_facts
from stagepack_loaders.elements import Array
from stagepack_loaders.exchange import array_ops_of, array_ops_of_call, to_elements
from stagepack_loaders.pipeline_sequence import PipelineSequence
from stagepack_text.loop.text_batch import BatchedText, TextSequence
from stagepack_text.loop.token_loop import TokenLoop
from stagepack_text.prompts import (
    TOKENIZER_FILE,
    Prompts,
    adapter_of,
    check_adapter_count,
    check_tokens,
    named_inputs,
    read_prompts,
    read_tokenizer,
)
from stagepack_text.sampling import logits_as_floats, token_logprobs
from stagepack_text.settings import GenerationSettings, read_settings
from stagepack_text.token_texts import StopStringMatcher

_IDS_INPUT = "input_ids"
_MASK_INPUT = "attention_mask"
_POSITIONS, _MOVES = "cache_position", "cache_moves"

# Called with the new tokens of each text, [batch].
TokenCallback = Callable[[Array], object]


class TextPipeline(Protocol):
    """What generation and embedding need of a `CallablePipeline`."""

    @property
    def bundle(self) -> Bundle:
        """The bundle."""

    @property
    def inputs(self) -> Sequence[Edge]:
        """The inputs."""

    @property
    def arrays(self) -> ArrayOps:
        """The operations on its arrays."""

    def inference(self, *, for_autograd: bool = True) -> AbstractContextManager[None]:
        """Return a context for calls that need no gradients."""

    def sequences(self, count: int) -> list[PipelineSequence]:
        """Return the pipeline so many times with state of its own, on one version of its weights."""

    def __call__(self, **inputs: Any) -> Any:
        """Call the pipeline."""


def generate(
    decoder: TextPipeline,
    inputs: Any,
    attention_mask: Any,
    settings: Mapping[str, Any],
    encoder: TextPipeline | None,
    on_tokens: TokenCallback | None,
    *,
    return_logprobs: bool,
    adapter: Any = None,
) -> Any:
    """Generate tokens; see `CallablePipeline.generate`."""
    facts = _checked_facts(decoder, has_encoder=encoder is not None)
    if encoder is not None and adapter is not None and not isinstance(encoder.bundle, AdaptedBundle):
        raise InputError(
            f"{encoder.bundle.location}: adapter: expected an encoder that is loaded with the adapters of its decoder"
        )
    inputs, attention_mask, settings = named_inputs(inputs, attention_mask, settings)
    chosen_settings = read_settings(decoder.bundle).override(settings)
    prompts = read_prompts(decoder.bundle, inputs, attention_mask, chosen_settings, continues=encoder is None)
    edges = {edge.name: edge for edge in decoder.inputs}
    vocabulary_size = facts.logits.shape[-1]
    if encoder is None and isinstance(vocabulary_size, int):
        check_tokens(decoder.bundle, prompts, vocabulary_size)
    text_count = _sequence_count(chosen_settings)
    repeated = prompts.repeat(text_count)
    encoder_adapter = adapter
    check_adapter_count(adapter, len(prompts.tokens))
    if isinstance(adapter, list | tuple):
        adapter = [name for name in adapter for _ in range(text_count)]
    stop_strings = _stop_strings(decoder.bundle, prompts, chosen_settings)
    with decoder.inference(for_autograd=False):
        if encoder is None:
            loop = TokenLoop(facts, chosen_settings, repeated.tokens, repeated.mask, stop_strings=stop_strings)
        else:
            rows = _encode(encoder, _encoder_inputs(encoder, inputs, prompts), facts.max_batch, encoder_adapter)
            if text_count > 1:
                rows = rows[numpy.repeat(numpy.arange(len(rows)), text_count).tolist()]
            loop = TokenLoop(facts, chosen_settings, chosen_settings.first_tokens(len(rows)), stop_strings=stop_strings)
            loop.read_encoded(rows, repeated.mask)
        logprobs: list[Array] = []
        for logits in _logits_of_calls(decoder, loop, facts, adapter):
            goes_on = [reason is None for reason in loop.finish_reasons]
            new_tokens = loop.take(logits)
            if return_logprobs:
                logprobs.append(numpy.where(goes_on, _logprobs(logits, new_tokens), numpy.float32(0)))
            if on_tokens is not None:
                on_tokens(new_tokens)
    arrays = array_ops_of_call([inputs], decoder.arrays)

    def to_caller(array: Array, dtype: str) -> Any:
        converted = arrays.from_elements(array, replace(edges[_IDS_INPUT], dtype=dtype))
        # A tensor of torch is on the device of that of the caller.
        return converted.to(inputs.device) if hasattr(converted, "to") and hasattr(inputs, "device") else converted

    has_texts = prompts.tokenizer is not None
    answer = repeated.texts(loop.tokens) if has_texts else to_caller(loop.tokens, edges[_IDS_INPUT].dtype)
    return (answer, to_caller(numpy.stack(logprobs, 1), "float32")) if return_logprobs else answer


def _checked_facts(decoder: TextPipeline, *, has_encoder: bool) -> DecoderFacts:
    """What generation needs to know of a decoder, which is called with the encoder that it needs, and only with that."""
    facts = decoder_facts(decoder.bundle.entry_point)
    if facts is not None and facts.takes_encoder == has_encoder:
        return facts
    expected = "a decoder with the inputs input_ids, cache_position and attention_mask"
    if facts is not None:
        expected = "encoder=, the pipeline of the encoder" if facts.takes_encoder else "no encoder="
    raise InputError(f"{decoder.bundle.location}: to generate, expected {expected}")


def _logits_of_calls(decoder: TextPipeline, loop: TokenLoop, facts: DecoderFacts, adapter: Any) -> Iterator[Array]:
    """Call a decoder until its texts have ended; yield the logits of each token, [batch, vocabulary], which the loop takes.

    Texts beyond the rows of a cache take turns, each group of them with a cache of its own.
    """
    edges = {edge.name: edge for edge in decoder.inputs}
    groups, plan = _groups(len(loop.tokens), facts.max_batch), TextSequence(BatchedText(loop))
    with contextlib.ExitStack() as contexts:
        sequences = [contexts.enter_context(sequence) for sequence in decoder.sequences(len(groups))]
        while (call := plan.next_call()) is not None:
            logits = []
            for group, sequence in zip(groups, sequences, strict=True):
                group_inputs = {
                    name: decoder.arrays.from_elements(value, edges[name])
                    if isinstance(value, numpy.ndarray)
                    else value
                    for name, value in _rows_of(call.inputs, group).items()
                }
                group_inputs |= adapter_of(range(len(loop.tokens))[group], adapter)
                logits.append(logits_as_floats(to_elements(sequence(**group_inputs), facts.logits), facts.logits))
            yield logits[0] if len(logits) == 1 else numpy.concatenate(logits)


def _encode(encoder: TextPipeline, inputs: Mapping[str, Any], most_texts: int | None, adapter: Any) -> Any:
    """What an encoder returns for all texts, with the adapters that the decoder has for them."""
    main_input = _main_input(encoder)
    value = inputs[main_input.name]
    has_batch = value.ndim == len(main_input.shape)  # an error of the call else, which names the input
    groups = _groups(len(value) if has_batch else 1, most_texts)
    if len(groups) == 1:
        return encoder(**inputs, **adapter_of(range(groups[0].stop), adapter))
    rows = [encoder(**_rows_of(inputs, group), **adapter_of(range(len(value))[group], adapter)) for group in groups]
    return array_ops_of(rows[0]).join(rows)


def _groups(text_count: int, most_texts: int | None) -> list[slice]:
    """The texts that share each call."""
    size = most_texts or max(1, text_count)
    return [slice(start, start + size) for start in range(0, max(1, text_count), size)]


def _rows_of(inputs: Mapping[str, Any], group: slice) -> dict[str, Any]:
    """The inputs of a call for some of the texts. Others than those of the texts are positions that all share, and moves."""
    return {
        input_name: value if input_name == _MOVES or (input_name == _POSITIONS and value.ndim == 1) else value[group]
        for input_name, value in inputs.items()
    }


def _logprobs(logits: Array, tokens: Array) -> Array:
    """How likely the tokens of a batch were, [batch]."""
    rows = zip(logits, tokens.tolist(), strict=True)
    return numpy.array([token_logprobs(row_logits, token, 0).logprob for row_logits, token in rows], numpy.float32)


def _sequence_count(settings: GenerationSettings) -> int:
    """The number of texts that each prompt is continued to."""
    count = settings.num_return_sequences
    if count > 1 and not settings.do_sample:
        raise InputError(
            f"num_return_sequences: expected 1 where the likeliest tokens are taken, found {count}: pass do_sample=True"
        )
    return count


def _stop_strings(bundle: Bundle, prompts: Prompts, settings: GenerationSettings) -> StopStringMatcher | None:
    if not settings.stop_strings:
        return None
    tokenizer = prompts.tokenizer or read_tokenizer(bundle)
    if tokenizer is None:
        raise InputError(
            f"{bundle.location}: stop_strings: expected a bundle with {TOKENIZER_FILE}, found none: stagepack asset add adds one"
        )
    return StopStringMatcher(tokenizer, settings.stop_strings)


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
