"""The generation of texts as a part of a served model, whose versions may have other tokenizers, templates and settings."""

import functools
from collections.abc import Sequence
from typing import Final

import numpy

from stagepack.adapter.opened import OpenAdapter
from stagepack.errors import OptionError
from stagepack_loaders.decoders import ENCODER_NAME, DecoderFacts, decoder_facts
from stagepack_loaders.versions import StageVersion
from stagepack_serving.server.errors import BadRequestError
from stagepack_serving.server.model_part import ModelPart
from stagepack_serving.server.served_model import ServedModel
from stagepack_text.prompts import TOKENIZER_FILE
from stagepack_text.server.generator import Generator, prompt_input
from stagepack_text.server.served_text import ServedText
from stagepack_text.server.text_loop import TextLoop
from stagepack_text.server.text_stream import FORMAT_FILES
from stagepack_text.settings import SETTINGS_FILE
from stagepack_text.version_assets import VersionAssets

# The input of an encoder that is 1 for tokens.
_MASK_INPUT: Final = "attention_mask"


class Generators(ModelPart):
    """Generates texts with a decoder, and with its encoder if it has one: each request as the version has it that it began with."""

    def __init__(self, facts: DecoderFacts, decoder: ServedModel, encoder: ServedModel | None) -> None:
        self._facts = facts
        self._decoder = decoder
        encode = None if encoder is None else functools.partial(self._encode, encoder)
        self._text_loop = TextLoop(decoder, facts, encode, encoder, reader_of=self.of)
        self._generators = VersionAssets(
            (TOKENIZER_FILE, *FORMAT_FILES, SETTINGS_FILE),
            functools.partial(Generator, text_loop=self._text_loop, facts=facts, decoder=decoder, encoder=encoder),
        )
        self.check_version(decoder.weights)
        decoder.admission.busy_count = self.texts_at_once + 1

    def of(self, weights: StageVersion) -> Generator:
        """Return what generates texts as a version of the decoder has it; versions with equal assets have the same one."""
        return self._generators.of(weights.bundle)

    @property
    def texts_at_once(self) -> int:
        """How many texts are generated at once: others wait."""
        return self._text_loop.row_count

    @property
    def joining(self) -> str:
        """How many texts share a run."""
        return f"up to {self.texts_at_once} text{'' if self.texts_at_once == 1 else 's'} at once"

    @property
    def text_count(self) -> int:
        """The number of texts that are generated, or wait for it."""
        return self._text_loop.text_count

    @property
    def held_tokens(self) -> int:
        """The number of tokens in the caches of batches."""
        return self._text_loop.held_tokens

    def check_new_adapter(self, adapter: OpenAdapter) -> None:
        """See `ModelPart`: texts of several adapters share calls."""
        _check_apart(self._decoder, self._facts, adapter.document.replaced, adapter.path.name)

    def check_version(self, weights: StageVersion) -> None:
        """See `ModelPart`: its tokenizer, chat template and settings are read."""
        self.of(weights)

    def follow_weights(self) -> None:
        """See `ModelPart`."""
        self._text_loop.follow_weights()

    def close(self) -> None:
        """End the processes that fill in chat templates."""
        for generator in self._generators.all():
            generator.close()

    async def _encode(self, encoder: ServedModel, text: ServedText, weights: StageVersion) -> None:
        """Run the encoder on the prompt of a text."""
        inputs = {prompt_input(encoder): text.request.prompt}
        if _MASK_INPUT in encoder.interface.inputs:
            inputs[_MASK_INPUT] = numpy.ones(text.request.prompt.shape, numpy.int64)
        [rows] = (await encoder.call(inputs, None, adapter=text.adapter, weights=weights)).values()
        text.loop.read_encoded(rows)


def generator_of(model: ServedModel) -> Generator:
    """Return what generates texts with the newest version of a model. A request uses it from its beginning to its end."""
    generators = model.part(Generators)
    if generators is None:
        message = f"{model.name}: the model does not generate: it has no decoder with the inputs of generation"
        if (facts := decoder_facts(model.bundle.entry_point)) is not None and facts.takes_encoder:
            message = f"{model.name}: the model does not generate: it is served without its encoder, and not as its whole bundle"
        raise BadRequestError(message)
    return generators.of(model.weights)


def _check_apart(model: ServedModel, facts: DecoderFacts, replaced: object, adapter: str | None) -> None:
    """Refuse an adapter that replaces whole weights, for a decoder whose texts share calls."""
    if facts.has_rows and replaced:
        raise OptionError(
            f"{model.name}: the adapter {adapter!r} replaces whole weights, and texts of several adapters share calls: merge it into a "
            "bundle of its own (stagepack adapter --merge)"
        )


def add_generators(models: Sequence[ServedModel]) -> None:
    """Make the decoders of a bundle generate."""
    by_entry_point = {model.bundle.entry_point.name: model for model in models}
    for model in models:
        facts = decoder_facts(model.bundle.entry_point)
        encoder = by_entry_point.get(ENCODER_NAME)
        if facts is not None:
            _check_apart(model, facts, model.adapters.apart, model.adapters.apart)
        if facts is not None and (encoder is not None or not facts.takes_encoder):
            model.parts[Generators] = Generators(facts, model, encoder if facts.takes_encoder else None)
