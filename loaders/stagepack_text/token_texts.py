"""What each token adds to a text, and the strings that end a text."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from stagepack.errors import InputError
from stagepack_loaders.elements import Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A token of the ByteFallback decoder of `tokenizers`.
BYTE_TOKEN: Final = re.compile("<0x[0-9A-Fa-f]{2}>")
# What the ByteLevel decoder of `tokenizers` makes bytes of: printable characters are themselves, others follow at 256.
_PRINTABLE: Final = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS: Final = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_CHARACTER: Final = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(_OTHERS)
}
# A decoder treats the first token of a text in its own way, so that others are decoded after this text.
_PREFIX: Final = "abcdef"


@contextlib.contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """Raise an `InputError` in the place of what the package tokenizers raises, which has no class of its own."""
    try:
        yield
    except BaseException as error:
        # A panic of the library, which is written in Rust, is no `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"the tokenizer of the bundle fails on {what}: {error}") from None


class StopStringMatcher:
    """Finds the strings that end a text in its tokens, as ``StopStringCriteria`` of transformers does.

    A string ends a text if it ends inside of the last token. It may begin in any token before, also in one of the prompt.
    """

    def __init__(self, tokenizer: "Tokenizer", stop_strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop_bytes = [stop_string.encode(errors="replace") for stop_string in stop_strings]
        # Each token but a few special ones adds a byte or more.
        self._most_tokens = max(map(len, self._stop_bytes))
        decoder_text = repr(tokenizer.decoder)
        self._has_byte_tokens = "ByteFallback" in decoder_text
        self._is_byte_level = "ByteLevel" in decoder_text and not self._has_byte_tokens
        self._prefix_tokens: list[str] = tokenizer.encode(_PREFIX, add_special_tokens=False).tokens
        self._bytes_of_tokens: dict[int, bytes | None] = {}

    def is_at_end(self, tokens: Array) -> bool:
        """Whether the last one of some tokens, [length], completes one of the strings."""
        text, last_length = b"", 0
        for token in tokens[-self._most_tokens :].tolist():
            token_bytes = self._token_bytes(token)
            text, last_length = (b"", 0) if token_bytes is None else (text + token_bytes, len(token_bytes))
        return any(
            text.find(stop_bytes, max(0, len(text) - last_length - len(stop_bytes) + 1)) >= 0
            for stop_bytes in self._stop_bytes
        )

    def _token_bytes(self, token: int) -> bytes | None:
        """What a token adds to a text, in UTF-8: a character may be torn apart; None for one that the tokenizer does not have."""
        if token not in self._bytes_of_tokens:
            token_text = self._tokenizer.id_to_token(token)
            self._bytes_of_tokens[token] = None if token_text is None else self._decode(token_text)
        return self._bytes_of_tokens[token]

    def _decode(self, token_text: str) -> bytes:
        if self._has_byte_tokens and BYTE_TOKEN.fullmatch(token_text):
            return bytes([int(token_text[3:5], 16)])
        if self._is_byte_level and all(character in BYTE_OF_CHARACTER for character in token_text):
            return bytes(BYTE_OF_CHARACTER[character] for character in token_text)
        decoder = self._tokenizer.decoder
        token_texts = [*self._prefix_tokens, token_text]
        with tokenizer_errors("a token"):
            text = " ".join(token_texts) if decoder is None else decoder.decode(token_texts)
        _, prefix, new_text = text.partition(_PREFIX)
        return (new_text if prefix else token_text).encode(errors="replace")
