"""How tokens are chosen: the settings of transformers' ``generate`` that change what is generated."""

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
import numpy

from stagepack.errors import InputError
from stagepack.format.limits import Int64
from stagepack.format.reader import Bundle
from stagepack.format.rules import JSON_ERRORS
from stagepack_loaders.elements import Array

_LOGGER: Final = logging.getLogger("stagepack")
SETTINGS_FILE: Final = "generation_config.json"
# A single token or string is written without a list.
_LISTS: Final = frozenset(
    {"suppress_tokens", "begin_suppress_tokens", "eos_token_id", "decoder_input_ids", "stop_strings"}
)

# Settings of transformers that are not read, with the values, beside null, that change no tokens.
_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "bad_words_ids": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": ([],),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "penalty_alpha": (0,),
    "sequence_bias": ({}, []),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}
# Bundles that are named in the log once, and not for each text.
_CHECKED_BUNDLES: Final = weakref.WeakSet[Bundle]()


@dataclass(frozen=True, slots=True)
class _Range:
    """The values that a setting may have.

    Attributes:
        expected: the range in words.
        contains: whether it has a value; never NaN.
        is_of_draws: the setting has no effect unless tokens are drawn.
    """

    expected: str
    contains: Callable[[float], bool]
    is_of_draws: bool = True


# Ranges of transformers. None, where a setting may be None, is in each of them.
_RANGES: Final[Mapping[str, _Range]] = {
    "max_new_tokens": _Range("1 or more", lambda count: count >= 1, is_of_draws=False),
    "temperature": _Range("more than 0 (do_sample=False takes the likeliest token)", lambda divisor: divisor > 0),
    "top_k": _Range("0 (draw among all tokens) or more", lambda count: count >= 0),
    "top_p": _Range("0 to 1", lambda probability: 0 <= probability <= 1),
    "min_p": _Range("0 to 1", lambda probability: 0 <= probability <= 1),
    "repetition_penalty": _Range("more than 0", lambda penalty: penalty > 0, is_of_draws=False),
    "presence_penalty": _Range("-2 to 2", lambda penalty: -2 <= penalty <= 2, is_of_draws=False),
    "frequency_penalty": _Range("-2 to 2", lambda penalty: -2 <= penalty <= 2, is_of_draws=False),
    "num_return_sequences": _Range("1 or more", lambda count: count >= 1, is_of_draws=False),
    "num_beams": _Range(
        "1 (the settings of beam search are not supported)", lambda count: count == 1, is_of_draws=False
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """How tokens are chosen. Names and defaults are those of transformers' ``GenerationConfig``, and of OpenAI's API where it has none.

    Attributes:
        max_new_tokens: the largest number of new tokens; None if `max_length` bounds them.
        max_length: the largest number of tokens of the prompt, or of the decoder's beginning, and of the new ones together. Without any of
            the two, 20 tokens are new, as in transformers, as far as the cache holds them.
        do_sample: draw tokens; otherwise the likeliest one is taken.
        temperature: divides the logits.
        top_k: draw among so many tokens; 0 is all.
        top_p: draw among the likeliest tokens that have this probability together.
        min_p: draw among tokens of this probability in relation to the likeliest one.
        repetition_penalty: more than 1 makes tokens of the text less likely.
        presence_penalty: is subtracted from the logits of tokens that were generated.
        frequency_penalty: is subtracted from the logits of a token for each time that it was generated.
        logit_bias: is added to the logits of these tokens.
        num_beams: 1, as there is no beam search.
        logits_processor: called with the tokens so far, [batch, length], and the scores of the next token, [batch, vocabulary]; returns
            the scores that tokens are chosen by, before those of `temperature` and what follows it.
        suppress_tokens: tokens that are never generated.
        begin_suppress_tokens: tokens that are not generated first.
        eos_token_id: tokens that end a text.
        stop_strings: strings that end a text, with the token that completes one of them; the bundle needs a tokenizer. Of the pipeline's
            ``generate``: requests to a server have their own.
        num_return_sequences: the number of texts that each prompt is continued to, which are drawn. Of the pipeline's ``generate`` too.
        pad_token_id: what follows a text that ends before others of its batch; None for the first token that ends a text.
        decoder_start_token_id: the token that a decoder after an encoder begins with.
        decoder_input_ids: the tokens that it begins with, in the place of that one.
        seed: the seed of the generator that draws; None for any.
    """

    max_new_tokens: Int64 | None = None
    max_length: Int64 | None = None
    do_sample: bool = False
    temperature: float = 1.0
    top_k: Int64 = 50
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[Int64, float] = field(default_factory=dict)
    num_beams: Int64 = 1
    logits_processor: Any = None
    suppress_tokens: tuple[Int64, ...] = ()
    begin_suppress_tokens: tuple[Int64, ...] = ()
    eos_token_id: tuple[Int64, ...] = ()
    stop_strings: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    num_return_sequences: Int64 = 1
    pad_token_id: Int64 | None = None
    decoder_start_token_id: Int64 = 0
    decoder_input_ids: tuple[Int64, ...] = ()
    seed: Int64 | None = None

    def first_tokens(self, batch_size: int) -> Array:
        """Return what a decoder after an encoder begins with.

        Args:
            batch_size: the number of texts.

        Returns:
            The tokens, [batch, length].
        """
        tokens = self.decoder_input_ids or (self.decoder_start_token_id,)
        return numpy.tile(numpy.array(tokens, numpy.int64), (batch_size, 1))

    def override(self, settings: Mapping[str, Any]) -> "GenerationSettings":
        """Return these settings with others in their place.

        Args:
            settings: the others by name; None leaves one as it is.

        Returns:
            The settings.

        Raises:
            InputError: a setting is unknown, or has another type, or is out of range. Those in place count too: they may come from a file.
        """
        chosen = self.replace(settings)
        for setting_name, allowed in _RANGES.items():
            value = getattr(chosen, setting_name)
            is_unused = value is None or (allowed.is_of_draws and not chosen.do_sample)
            if not is_unused and not allowed.contains(value):
                origin = "" if settings.get(setting_name) is not None else f" in {SETTINGS_FILE} of the bundle"
                raise InputError(f"{setting_name}: expected {allowed.expected}, found {value}{origin}")
        return chosen

    def replace(self, settings: Mapping[str, Any]) -> "GenerationSettings":
        """Return these settings with others in their place, whose ranges are not checked: those of a file, which a call may replace.

        Args:
            settings: the others by name; None leaves one as it is.

        Returns:
            The settings.

        Raises:
            InputError: a setting is unknown, or has another type.
        """
        known_names = self.__dataclass_fields__.keys()
        if unknown := settings.keys() - known_names:
            raise InputError(f"unknown setting {sorted(unknown)[0]!r}: expected one of {', '.join(known_names)}")
        new_values = {setting_name: value for setting_name, value in settings.items() if value is not None}
        try:
            for setting_name in _LISTS & new_values.keys():
                value = new_values[setting_name]
                new_values[setting_name] = [value] if isinstance(value, int | str) else list(value)
            return msgspec.convert(_as_fields(self) | new_values, GenerationSettings)
        except (msgspec.ValidationError, TypeError) as error:
            raise InputError(f"the settings of generation: {error}") from None


_DEFAULTS: Final = GenerationSettings()


def read_settings(bundle: Bundle, defaults: GenerationSettings = _DEFAULTS) -> GenerationSettings:
    """Read the settings in the file generation_config.json of a bundle, over those that it has by default.

    The log names settings of the file that are not supported, once for a bundle.
    """
    if SETTINGS_FILE not in bundle.files:
        return defaults
    try:
        stored: Any = msgspec.json.decode(bundle.read(SETTINGS_FILE), type=dict[str, Any])
        known_values = {
            setting_name: value
            for setting_name, value in stored.items()
            if setting_name in GenerationSettings.__dataclass_fields__.keys() - {"logits_processor"}
        }
        settings = defaults.replace(known_values)
    except (*JSON_ERRORS, InputError) as error:
        raise InputError(f"{bundle.location}: {SETTINGS_FILE}: {error}") from None
    unsupported_names = [
        setting_name
        for setting_name, neutral_values in _UNSUPPORTED.items()
        if stored.get(setting_name) not in (None, *neutral_values)
    ]
    if unsupported_names and bundle not in _CHECKED_BUNDLES:
        _CHECKED_BUNDLES.add(bundle)
        message = "%s: %s: %s is not supported: tokens differ from those of transformers"
        _LOGGER.warning(message, bundle.location, SETTINGS_FILE, ", ".join(unsupported_names))
    return settings


def _as_fields(settings: GenerationSettings) -> dict[str, Any]:
    return {setting_name: getattr(settings, setting_name) for setting_name in settings.__dataclass_fields__}
