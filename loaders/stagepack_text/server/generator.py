"""Generation with a served decoder, token by token, as the tokenizer and the settings of one version of its bundle have it."""

import asyncio
import dataclasses
import functools
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy
from msgspec import Raw

from stagepack.errors import InputError
from stagepack.format.reader import Bundle
from stagepack_loaders.decoders import (
    DecoderFacts,
    largest_size,
)
from stagepack_loaders.elements import Array
from stagepack_serving.protocol.datatypes import NUMPY_DTYPES
from stagepack_serving.server.access_log import current_record
from stagepack_serving.server.errors import CONTEXT_CODE, BadRequestError, FieldError
from stagepack_serving.server.parameters import InferenceTensor
from stagepack_serving.server.rest_large_request import beside_loop
from stagepack_serving.server.served_model import ServedModel
from stagepack_serving.server.tensor_decoding import array_from_json, nested_sizes, tensor_from_numbers
from stagepack_text.prompts import Prompts, check_tokens
from stagepack_text.server.json_grammar import GrammarTokens, JsonGrammar, read_grammar_tokens
from stagepack_text.server.served_text import GeneratedPart, GenerationRequest, ServedText
from stagepack_text.server.text_loop import TextLoop
from stagepack_text.server.text_stream import TextFormat, read_text_format
from stagepack_text.settings import GenerationSettings, read_settings

# The input of a model that holds tokens.
IDS_INPUT: Final = "input_ids"
_NO_TOKENS: Final = f"{IDS_INPUT}: the prompt has no tokens: expected one or more"
# OpenAI's API draws tokens among all.
_OPENAI_DEFAULTS: Final = GenerationSettings(do_sample=True, top_k=0)
# More than any prompt that fits: longer texts are not read.
_MAX_CHARACTERS_PER_TOKEN: Final = 128


class Generator:
    """Generates texts with a decoder, and with its encoder if it has one.

    Attributes:
        text_format: the tokenizer and the chat template; None for a bundle without a tokenizer.
        prompt_name: the input that holds the prompt: of the encoder, or of a decoder without one.
    """

    def __init__(
        self,
        bundle: Bundle,
        text_loop: TextLoop,
        facts: DecoderFacts,
        decoder: ServedModel,
        encoder: ServedModel | None,
    ) -> None:
        self._text_loop = text_loop
        self._facts = facts
        self._settings = read_settings(bundle)
        self._openai_defaults = read_settings(bundle, _OPENAI_DEFAULTS)
        self._decoder = decoder
        self._encoder = encoder
        self._prompt_interface = (encoder or decoder).interface
        self._grammar_tokens: GrammarTokens | None = None
        self.text_format: TextFormat | None = read_text_format(bundle)
        self.prompt_name = prompt_input(encoder or decoder)

    @property
    def continues_prompt(self) -> bool:
        """Whether a text goes on from its prompt; otherwise an encoder reads the prompt."""
        return self._encoder is None

    @property
    def reads_text(self) -> bool:
        """Whether a prompt may be a text."""
        return self.text_format is not None and self.prompt_name == IDS_INPUT

    async def encode_text(self, text: str, *, adds_special_tokens: bool = True) -> Array:
        """Convert a text to a prompt, [1, length]."""
        if self.text_format is None or not self.reads_text:
            raise BadRequestError(f"{self._decoder.name}: the model takes no text: send {self.prompt_name}")
        if len(text) > self._facts.max_positions * _MAX_CHARACTERS_PER_TOKEN:
            expected = f"expected at most {_MAX_CHARACTERS_PER_TOKEN} characters for each of {self._facts.max_positions} positions"
            raise BadRequestError(f"{self._decoder.name}: {expected}, found {len(text)}", CONTEXT_CODE)
        # In a thread: a long text takes as long as other requests must not wait for.
        tokens = await asyncio.to_thread(self.text_format.encode, text, adds_special_tokens=adds_special_tokens)
        tensor = self._prompt_interface.inputs[self.prompt_name]
        array = numpy.array([tokens], NUMPY_DTYPES[tensor.datatype])
        return self._check_prompt(InferenceTensor(name=self.prompt_name, datatype=tensor.datatype, array=array))

    async def read_prompt(self, prompt: str | Raw | InferenceTensor) -> Array:
        """Read a text, or the input `prompt_name`: a tensor, or JSON, in whose lists the batch dimension, which is 1, may be missing."""
        if isinstance(prompt, str):
            return await self.encode_text(prompt)
        if isinstance(prompt, Raw):
            text = bytes(prompt)
            if self.prompt_name == IDS_INPUT and not text.strip(b"[] \t\r\n"):
                raise BadRequestError(_NO_TOKENS)
            prompt = await beside_loop(len(text), self._tensor_from_json, text)
        return self._check_prompt(prompt)

    def openai_settings(
        self, prompt: Array, settings: Mapping[str, Any], default_count: int | None = None
    ) -> dict[str, Any]:
        """Return the settings of an answer over OpenAI's API: what neither the request nor the bundle says is as that API has it.

        Without a largest number of new tokens, an answer may take the default, and all positions that are left.
        """
        defaults, room = self._openai_defaults, self._room(prompt)
        new_settings: dict[str, Any] = {"do_sample": defaults.do_sample, "top_k": defaults.top_k, **settings}
        new_settings.setdefault("max_new_tokens", max(1, min(default_count or defaults.max_new_tokens or room, room)))
        wanted_count = new_settings["max_new_tokens"]
        if wanted_count > room:
            # Libraries of clients look for these words of OpenAI.
            raise BadRequestError(
                f"{self._decoder.name}: this model's maximum context length is {self._facts.max_positions + 1} tokens, found a prompt of "
                f"{prompt.shape[1]} and max_tokens of {wanted_count}: shorten the prompt, or ask for fewer tokens",
                CONTEXT_CODE,
            )
        self._check_biases(new_settings.get("logit_bias", ()))
        return new_settings

    def _room(self, prompt: Array) -> int:
        """The number of tokens that the cache has room for after a prompt. The last one takes no position: it is not read."""
        first_tokens = prompt if self._encoder is None else self._settings.first_tokens(1)
        return self._facts.max_positions + 1 - int(first_tokens.shape[1])

    def _check_biases(self, tokens: Iterable[int]) -> None:
        vocabulary_size = self._facts.logits.shape[-1]
        for token in tokens:
            if token < 0 or (isinstance(vocabulary_size, int) and token >= vocabulary_size):
                expected = f"expected tokens from 0 to the end of the vocabulary ({vocabulary_size})"
                raise FieldError("logit_bias", f"{expected}, found {token}")

    def compile_schema(self, schema: Mapping[str, Any] | bool, frame: tuple[str, str] = ("", "")) -> JsonGrammar:
        """Compile the schema of JSON between two texts, which texts satisfy. It takes up to a second: call it in a thread."""
        if self._grammar_tokens is None:
            end_tokens = self._settings.eos_token_id
            self._grammar_tokens = read_grammar_tokens(self.text_format, self._facts.logits.shape[-1], end_tokens)
        return self._grammar_tokens.compile(schema, frame)

    def prompt_scoring(self, prompt: Array, logprob_count: int, adapter: str | None = None) -> GenerationRequest:
        """Return a request whose parts have the tokens of a prompt after the first one, and how likely each was.

        A decoder returns the logits of its last token alone, so that each token of the prompt takes a call.
        """
        vocabulary_size, last_token = self._facts.logits.shape[-1], prompt[0, 1:].max()
        if isinstance(vocabulary_size, int) and last_token >= vocabulary_size:
            expected = f"tokens that the model has logits of, 0 to {vocabulary_size - 1}, beside `echo`"
            raise FieldError("logprobs", f"expected {expected}, found {last_token} in the prompt")

        def choose_next(tokens: Array, scores: Array) -> Array:
            next_tokens = numpy.full_like(scores, -numpy.inf)
            next_tokens[:, prompt[0, tokens.shape[1]]] = 0
            return next_tokens

        settings = {
            "do_sample": False,
            "eos_token_id": [],
            "logits_processor": choose_next,
            "max_new_tokens": prompt.shape[1] - 1,
            "num_beams": 1,
        }
        return GenerationRequest(prompt=prompt[:, :1], settings=settings, logprob_count=logprob_count, adapter=adapter)

    def adapter_of(self, model_name: str) -> str | None:
        """Return the adapter that clients name as a model of its own; None for the decoder itself."""
        return self._decoder.adapter_named(model_name)

    def check_adapter(self, adapter: str | None) -> None:
        """Refuse an adapter that the decoder does not have now."""
        if adapter is not None and adapter not in self._decoder.adapters.names:
            known = ", ".join(self._decoder.adapters.names) or "none"
            raise BadRequestError(
                f"{self._decoder.name}: adapter: expected one of its adapters, {known}, found {adapter!r}"
            )

    def close(self) -> None:
        """End the processes that fill in the chat template."""
        if self.text_format is not None and self.text_format.chat_template is not None:
            self.text_format.chat_template.close()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[GeneratedPart, None]:
        """Generate texts at the same time: yield the parts of all as they come. All join the queue at once."""
        parts: asyncio.Queue[GeneratedPart | Exception] = asyncio.Queue()
        try:
            texts = [
                ServedText(self._facts, self._settings, request, self.text_format, parts, index, reader=self)
                for index, request in enumerate(requests)
            ]
        except InputError as error:
            raise BadRequestError(f"{self._decoder.name}: {error}") from None
        try:
            for text in texts:
                self._text_loop.begin(text)
            running, record = len(texts), current_record.get()
            while running:
                part = await parts.get()
                if isinstance(part, Exception):
                    raise part
                if record is not None:
                    record.weights = part.weights
                yield part
                running -= part.finish_reason is not None
        finally:
            for text in texts:
                self._text_loop.end(text)

    def _tensor_from_json(self, text: bytes) -> InferenceTensor:
        tensor, shape = self._prompt_interface.inputs[self.prompt_name], nested_sizes(text)
        read_array = functools.partial(array_from_json, text, shape=shape)
        prompt = tensor_from_numbers(self.prompt_name, tensor.datatype, shape, read_array)
        has_batch = len(shape) != len(tensor.shape) - 1
        return prompt if has_batch else dataclasses.replace(prompt, array=prompt.array[None])

    def _check_prompt(self, prompt: InferenceTensor) -> Array:
        """The array of a prompt."""
        try:
            shape = self._prompt_interface.check_input(prompt.name, prompt.datatype, prompt.array.shape)
        except InputError as error:
            code = CONTEXT_CODE if self._is_too_long(prompt) else None
            raise BadRequestError(f"{self._decoder.name}: {error}", code) from None
        if prompt.name == IDS_INPUT and tuple(shape) == (1, 0):
            raise BadRequestError(_NO_TOKENS)
        expected_shape = [1, *self._prompt_interface.inputs[prompt.name].shape[1:]]
        if len(shape) != len(expected_shape) or shape[0] != 1 or not prompt.array.size:
            message = f"{prompt.name}: expected one prompt, the shape {expected_shape}, found {list(shape)}"
            raise BadRequestError(message)
        if prompt.name == IDS_INPUT:
            self._check_tokens(prompt.array)
        return prompt.array

    def _is_too_long(self, prompt: InferenceTensor) -> bool:
        """Whether a prompt has more tokens than the model reads."""
        edge = self._prompt_interface.inputs[self.prompt_name].edge
        is_batch = prompt.name == IDS_INPUT and prompt.array.ndim == len(edge.shape) == 2
        largest = (
            largest_size(edge.shape[1], (self._encoder or self._decoder).bundle.entry_point.symbols)
            if is_batch
            else None
        )
        return largest is not None and prompt.array.shape[1] > largest

    def _check_tokens(self, tokens: Array) -> None:
        """Refuse tokens that the model does not have, which a runtime may read memory beyond its vocabulary for.

        That of an encoder may be another one than that of the logits: what is beyond it is left to its runtime.
        """
        vocabulary_size = self._facts.logits.shape[-1]
        tokenizer = None if self.text_format is None else self.text_format.tokenizer
        if self._encoder is not None or not isinstance(vocabulary_size, int):
            if tokens.min() < 0:
                message = f"{self._decoder.name}: {IDS_INPUT}: expected tokens from 0 on, found {tokens.min()}"
                raise BadRequestError(message)
            return
        try:
            prompts = Prompts(tokens=tokens, mask=None, tokenizer=tokenizer)
            check_tokens(self._decoder.bundle, prompts, vocabulary_size)
        except InputError as error:
            raise BadRequestError(f"{self._decoder.name}: {error}") from None


def prompt_input(model: ServedModel) -> str:
    """Return the name of the input of a model that holds a prompt."""
    return next(name for name in model.interface.inputs if name.startswith("input_"))
