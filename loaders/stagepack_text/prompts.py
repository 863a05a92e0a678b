"""What a caller of `generate` gives -> the tokens of a batch, and its answer as an array or a text of the same kind."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy

from stagepack.errors import InputError
from stagepack.extras import explain_missing_packages
from stagepack.format.reader import Bundle
from stagepack_loaders.elements import Array
from stagepack_text.settings import GenerationSettings
from stagepack_text.token_texts import tokenizer_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE: Final = "tokenizer.json"
# What tokenizers and feature extractors of transformers return: `generate(**tokenizer(text))`.
_INPUT_NAMES: Final = ("input_ids", "input_features", "input_values", "inputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The texts of a batch.

    Attributes:
        tokens: the tokens, [batch, length], or what else an encoder reads.
        mask: 1 for tokens and 0 for padding, [batch, length]; None if there is no padding.
        tokenizer: what made the tokens of texts; None if the caller gave tokens.
        is_single: the caller gave a single text.
    """

    tokens: Array
    mask: Array | None
    tokenizer: "Tokenizer | None" = None
    is_single: bool = False

    def repeat(self, count: int) -> "Prompts":
        """Return each text so many times, one after the other."""
        if count == 1:
            return self
        mask = None if self.mask is None else numpy.repeat(self.mask, count, 0)
        return replace(self, tokens=numpy.repeat(self.tokens, count, 0), mask=mask, is_single=False)

    def texts(self, tokens: Array) -> str | list[str]:
        """Return the texts of tokens, without special tokens."""
        assert self.tokenizer is not None
        with tokenizer_errors("the tokens"):
            decoded: list[str] = self.tokenizer.decode_batch(tokens.tolist(), skip_special_tokens=True)
        return decoded[0] if self.is_single else decoded


def named_inputs(inputs: Any, mask: Any, settings: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return the inputs, the mask and the settings of a call, which may have the first two by their names in transformers."""
    given = inputs if isinstance(inputs, Mapping) else {"inputs": inputs}
    named = {name: value for name, value in {**given, "attention_mask": mask}.items() if value is not None}
    named |= {name: value for name, value in settings.items() if value is not None}
    found_names = [name for name in _INPUT_NAMES if name in named]
    if len(found_names) != 1:
        raise InputError(
            f"generate: expected one of {', '.join(_INPUT_NAMES)}, found {', '.join(found_names) or 'none'}"
        )
    return named.pop(found_names[0]), named.pop("attention_mask", None), named


def read_prompts(bundle: Bundle, inputs: Any, mask: Any, settings: GenerationSettings, *, continues: bool) -> Prompts:
    """Return the texts of a batch.

    inputs: a text or several, tokens [length] or [batch, length] as an array or as lists, or what else an encoder reads.
    mask: 1 for tokens and 0 for padding, [batch, length]; None for no padding, or for that of lists of several lengths and that of the
        padding token, as in transformers.
    continues: the decoder continues the texts, which are then padded on the left: others are moved. An encoder reads them as they are.
    """
    if isinstance(inputs, list | tuple) and not inputs:
        raise InputError("generate: the list is empty: give a text, a list of texts, or tokens [batch, length]")
    texts = [inputs] if isinstance(inputs, str) else inputs
    if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
        tokenizer = read_tokenizer(bundle)
        if tokenizer is None:
            raise InputError(f"{bundle.location}: expected tokens, found a text: the bundle has no {TOKENIZER_FILE}")
        with tokenizer_errors("the text"):
            rows = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
        _require_tokens(rows)
        tokens, text_mask = _padded(rows, settings, on_left=continues)
        return Prompts(tokens=tokens, mask=text_mask, tokenizer=tokenizer, is_single=isinstance(inputs, str))
    if mask is None and _has_several_lengths(inputs):
        _require_tokens(inputs)
        tokens, row_mask = _padded(inputs, settings, on_left=continues)
        return Prompts(tokens=tokens, mask=row_mask)
    tokens, given_mask = _host_array(inputs), None if mask is None else _host_array(mask)
    if not tokens.size:
        raise InputError(f"generate: expected 1 text or more with tokens, found the shape {list(tokens.shape)}")
    if numpy.issubdtype(tokens.dtype, numpy.integer) and tokens.ndim == 1:
        tokens, given_mask = tokens[None], None if given_mask is None else given_mask.reshape(1, -1)
    if continues:
        return _moved_left(tokens, given_mask, settings)
    return Prompts(tokens=tokens, mask=given_mask)


def _has_several_lengths(inputs: Any) -> bool:
    is_rows = isinstance(inputs, list | tuple) and all(isinstance(row, list | tuple) for row in inputs)
    return is_rows and len({len(row) for row in inputs}) > 1


def _require_tokens(rows: Sequence[Sequence[int]]) -> None:
    for position, row in enumerate(rows):
        if not row:
            place = "the text" if len(rows) == 1 else f"the text at position {position}"
            raise InputError(f"generate: {place} has no tokens: give a text")


def read_tokenizer(bundle: Bundle, *, cuts_and_pads: bool = False) -> "Tokenizer | None":
    """Return the tokenizer of a bundle; None if the bundle has none."""
    if TOKENIZER_FILE not in bundle.files:
        return None
    with explain_missing_packages():
        from tokenizers import Tokenizer  # noqa: PLC0415 - optional
    content = bundle.read(TOKENIZER_FILE)
    with tokenizer_errors(f"{bundle.location}: {TOKENIZER_FILE}"):
        tokenizer = Tokenizer.from_buffer(content)
    if not cuts_and_pads:
        # What cut and padded the texts of the training may be stored with it.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def check_adapter_count(adapter: Any, text_count: int) -> None:
    """Check that a list of adapters has one for each text."""
    if isinstance(adapter, list | tuple) and len(adapter) != text_count:
        raise InputError(
            f"adapter: expected a name for all texts, or a list with one for each of {text_count}, found {len(adapter)} in a list"
        )


def adapter_of(positions: Iterable[int], adapter: Any) -> dict[str, Any]:
    """Return the adapter of a call for the texts at some positions, as its keyword.

    adapter: that of all texts, or a list of those of each.
    """
    if adapter is None:
        return {}
    return {"adapter": [adapter[position] for position in positions] if isinstance(adapter, list | tuple) else adapter}


def check_tokens(bundle: Bundle, prompts: Prompts, vocabulary_size: int) -> None:
    """Check that a decoder has the tokens that it continues."""
    tokens = prompts.tokens if prompts.mask is None else prompts.tokens[prompts.mask != 0]
    if ((tokens >= 0) & (tokens < vocabulary_size)).all():
        return
    tokenizer = prompts.tokenizer or read_tokenizer(bundle)
    if tokenizer is not None:
        vocabulary_size = max([vocabulary_size, *(token + 1 for token in tokenizer.get_vocab().values())])
    unknown_tokens = tokens[(tokens < 0) | (tokens >= vocabulary_size)]
    if len(unknown_tokens):
        expected = f"tokens from 0 to {vocabulary_size - 1}"
        raise InputError(f"input_ids: expected {expected}, found {unknown_tokens[0]}")


def _padded(rows: Sequence[Sequence[int]], settings: GenerationSettings, *, on_left: bool) -> tuple[Array, Array]:
    """Rows of several lengths as tokens and their mask."""
    length = max(map(len, rows), default=0)
    tokens = numpy.full((len(rows), length), settings.pad_token_id or 0, numpy.int64)
    mask = numpy.zeros((len(rows), length), numpy.int64)
    for number, row in enumerate(rows):
        place = slice(length - len(row), length) if on_left else slice(0, len(row))
        tokens[number, place], mask[number, place] = row, 1
    return tokens, mask


def _moved_left(tokens: Array, mask: Array | None, settings: GenerationSettings) -> Prompts:
    """Tokens whose padding comes first. A cache is filled from its first position on, and the last token is continued."""
    if tokens.ndim != 2 or not numpy.issubdtype(tokens.dtype, numpy.integer):
        raise InputError(f"input_ids: expected integers [batch, length], found {tokens.dtype}{list(tokens.shape)}")
    padding_token = settings.pad_token_id
    if mask is None and padding_token not in (None, *settings.eos_token_id) and (tokens == padding_token).any():
        mask = (tokens != padding_token).astype(numpy.int64)
    if mask is None:
        return Prompts(tokens=tokens, mask=None)
    if mask.shape != tokens.shape:
        raise InputError(f"attention_mask: expected the shape {list(tokens.shape)}, found {list(mask.shape)}")
    if not mask.any(1).all():
        raise InputError("attention_mask: expected a token in each text, found a text of padding")
    shifts = numpy.argmax(mask[:, ::-1] != 0, axis=1)
    columns = (numpy.arange(tokens.shape[1]) - shifts[:, None]) % tokens.shape[1]
    return Prompts(tokens=numpy.take_along_axis(tokens, columns, 1), mask=numpy.take_along_axis(mask, columns, 1))


def _host_array(array: Any) -> Array:
    """An array of numbers of any runtime, or nested lists of them, as one of numpy."""
    return numpy.asarray(array.cpu() if hasattr(array, "cpu") else array)
