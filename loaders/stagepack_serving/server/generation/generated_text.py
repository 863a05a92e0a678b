"""What a generation produces, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stagepack_serving.server.generation.text_format import TextFormat
from stagepack_serving.server.generation.text_stream import StopStrings

# Why a text ends: a token or a string that ends it, or the largest number of tokens.
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedPart:
    """What one token adds to a text.

    Attributes:
        token: the token.
        text: the text that is complete with it; often empty, since a character or a stop string may take several tokens.
        finish_reason: why the text ends with it; None if it goes on.
    """

    token: int
    text: str
    finish_reason: FinishReason | None = None


class GeneratedText:
    """A text that grows by tokens."""

    def __init__(self, text_format: TextFormat | None, stop_strings: Sequence[str]) -> None:
        self._stream = None if text_format is None else text_format.start_text()
        self._stop_strings = StopStrings(stop_strings)

    def add(self, token: int, finish_reason: FinishReason | None) -> GeneratedPart:
        """Add a token.

        finish_reason: why it is the last token of the model; None if it is not.
        """
        if self._stream is None:
            return GeneratedPart(token=token, text="", finish_reason=finish_reason)
        new_text = self._stream.add(token)
        if finish_reason is not None:
            new_text += self._stream.finish()
        text = self._stop_strings.add(new_text)
        if self._stop_strings.is_found:
            return GeneratedPart(token=token, text=text, finish_reason="stop")
        if finish_reason is not None:
            text += self._stop_strings.finish()
        return GeneratedPart(token=token, text=text, finish_reason=finish_reason)
