"""The text of tokens that arrive one by one, and the strings that end it."""

import re
from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

# A token of the ByteFallback decoder of `tokenizers`. It decodes each run of such tokens as a whole.
_BYTE_TOKEN: Final = re.compile("<0x[0-9A-Fa-f]{2}>")
# What an incomplete UTF-8 character is decoded to.
_REPLACEMENT: Final = "\ufffd"


class TextStream:
    """Decodes the tokens of one text as they arrive: the parts, joined, equal the text that all tokens are decoded to at once.

    A part ends where later tokens cannot change it: not inside of a UTF-8 character, and not inside of a run of byte tokens. Only the
    tokens since the previous such place are decoded again, after those of the previous part, since a decoder treats the first token of
    a text in its own way.
    """

    def __init__(self, tokenizer: Tokenizer, special_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._settled_tokens: list[int] = []
        self._new_tokens: list[int] = []

    def add(self, token: int) -> str:
        """Add a token.

        The result is the text that is complete with it; empty if there is none.
        """
        token_text = self._tokenizer.id_to_token(token)
        if token_text is None or token in self._special_tokens:
            return ""
        self._new_tokens.append(token)
        text = "" if _BYTE_TOKEN.fullmatch(token_text) else self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._settled_tokens, self._new_tokens = self._new_tokens, []
        return text

    def finish(self) -> str:
        """End the text."""
        return self._new_text()

    def _new_text(self) -> str:
        settled_text = self._decode(self._settled_tokens)
        return self._decode(self._settled_tokens + self._new_tokens)[len(settled_text) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False) if tokens else ""
        return text


class StopStrings:
    """Looks for strings that end a text, in parts as they arrive. A part is held back while it may begin one of them.

    Attributes:
        is_found: whether one of the strings was found; the text has ended before it.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = stop_strings
        self._held_text = ""
        self.is_found = False

    def add(self, text: str) -> str:
        """Add a part of the text."""
        text = self._held_text + text
        positions = [position for stop in self._stop_strings if (position := text.find(stop)) >= 0]
        if positions:
            self.is_found, self._held_text = True, ""
            return text[: min(positions)]
        held_length = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        sent_length = len(text) - held_length
        self._held_text = text[sent_length:]
        return text[:sent_length]

    def finish(self) -> str:
        """End the text."""
        return self._held_text


def _overlap(text: str, stop_string: str) -> int:
    """The length of the longest end of a text that begins a stop string."""
    longest = min(len(text), len(stop_string) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop_string[:length])), 0)
