"""Where the tokens of a text begin in it, in characters."""

import codecs
from collections.abc import Sequence
from itertools import accumulate

from stagepack_text.server.text_stream import TextFormat
from stagepack_text.token_texts import BYTE_TOKEN


class TokenStarts:
    """Follows a text that grows by tokens.

    Most tokens end a part of the text that later ones do not change, whose length their decoder says: it drops the space before the first
    word, for example. The tokens of a part that several make, such as the bytes of a character, are told apart by their bytes.
    """

    def __init__(self, text_format: TextFormat | None) -> None:
        self._text_format = text_format
        self._offsets: list[int] = []
        self._open_tokens: list[int] = []  # since the last part
        self._length = 0  # of the text before them
        self.begin_text(0)

    def begin_text(self, length: int) -> None:
        """Begin another text after the tokens so far, where so many characters precede it."""
        if self._open_tokens:
            self._offsets += self._open_offsets()
        self._open_tokens, self._length = [], length
        self._stream = None if self._text_format is None else self._text_format.start_text()

    def add(self, token: int) -> None:
        """Add a token."""
        new_text = "" if self._stream is None else self._stream.add(token)
        self._open_tokens.append(token)
        if new_text:
            self._offsets += _offsets_in(self._text_format, self._open_tokens, new_text, self._length)
            self._open_tokens, self._length = [], self._length + len(new_text)

    def offsets(self) -> list[int]:
        """Return the place of each token so far: of one inside of a character, where that begins."""
        return self._offsets + self._open_offsets()

    def _open_offsets(self) -> list[int]:
        if self._stream is None or not self._open_tokens:
            return [self._length] * len(self._open_tokens)
        return _offsets_in(self._text_format, self._open_tokens, self._stream.finish(), self._length)


def _offsets_in(text_format: TextFormat | None, tokens: Sequence[int], text: str, start: int) -> list[int]:
    """The places of tokens that make a part of a text, which begins at a place."""
    if text_format is None or len(tokens) == 1:
        return [start] * len(tokens)
    contents = [b"" if text_format.is_special(token) else text_format.token_bytes(token) for token in tokens]
    content = b"".join(contents)
    whole = content.decode(errors="replace")
    if whole.endswith(text):
        characters = _characters_of_bytes(content)
        starts = [characters[byte_index] for byte_index in accumulate(map(len, contents), initial=0)]
    else:
        # The ByteFallback decoder writes a replacement for each byte of a run that is no UTF-8.
        token_names = [text_format.tokenizer.id_to_token(token) or "" for token in tokens]
        lengths = [
            1 if BYTE_TOKEN.fullmatch(token_name) else len(content.decode(errors="replace"))
            for token_name, content in zip(token_names, contents, strict=True)
        ]
        starts = list(accumulate(lengths, initial=0))
    dropped = starts[-1] - len(text)
    return [start + min(max(0, offset - dropped), len(text)) for offset in starts[:-1]]


def _characters_of_bytes(content: bytes) -> list[int]:
    """The position of the character that each byte belongs to, and the number of characters."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    positions, count = [], 0
    for byte in content:
        count += len(decoder.decode(bytes([byte])))
        is_inside = bool(decoder.getstate()[0])
        positions.append(count if is_inside else count - 1)
    return [*positions, count + len(decoder.decode(b"", final=True))]
