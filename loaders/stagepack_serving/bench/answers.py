"""Answers as they arrive: whether they are whole, and the tokens of texts.

The times of a text are those of ``vllm bench serve``: the time to its first token (TTFT), the time between two events of its stream (ITL),
and the mean time of each token after the first one (TPOT).
"""

import time
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import Struct

from stagepack.format.rules import JSON_ERRORS

_EVENT_END: Final = b"\n\n"
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(Struct):
    """What is read of an event, or of a whole answer, of OpenAI's API or of the generate extension."""

    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: Any = None
    text_output: Any = None


_DECODER: Final = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class TextTimes:
    """When the parts of a text arrived, in seconds of `time.perf_counter`, and how many tokens they have."""

    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0


class AnswerReader:
    """Reads the body of an answer that is no text: it is whole when the connection says so."""

    times: TextTimes | None = None

    def read(self, data: bytes) -> None:
        """Read a part of the body."""

    @property
    def is_whole(self) -> bool:
        """Whether the body is a whole answer without an error, if the connection has delivered all of it."""
        return True


class EventReader(AnswerReader):
    """Reads the server-sent events of a text."""

    def __init__(self) -> None:
        self.times: TextTimes = TextTimes()
        self._buffer = bytearray()
        self._has_error = False
        self._is_done = False

    def read(self, data: bytes) -> None:
        """Read a part of the body."""
        now = time.perf_counter()
        self._buffer += data
        while (end := self._buffer.find(_EVENT_END)) >= 0:
            event, self._buffer = bytes(self._buffer[:end]), self._buffer[end + len(_EVENT_END) :]
            if event.startswith(_DATA):
                self._read_event(event[len(_DATA) :].strip(), now)

    def _read_event(self, content: bytes, now: float) -> None:
        if content == _DONE:
            self._is_done = True
            return
        try:
            event = _DECODER.decode(content)
        except JSON_ERRORS:
            self._has_error = True
            return
        self._has_error |= event.error is not None
        if event.choices or event.text_output is not None:
            self.times.arrivals.append(now)
        if event.usage is not None:
            self.times.prompt_tokens = event.usage.prompt_tokens
            self.times.output_tokens = event.usage.completion_tokens

    @property
    def is_whole(self) -> bool:
        """Whether the stream has ended as it should, with a text and without an error."""
        return self._is_done and not self._has_error and bool(self.times.arrivals)
