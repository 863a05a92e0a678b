"""Sequences of calls to a model with state: each sees what its own calls have written, and nothing of others.

The request says which sequence it belongs to, by the parameters `sequence_id`, `sequence_start` and `sequence_end`. Source: Triton's
sequence extension, https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_sequence.md.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stagepack_serving.server.errors import Reason, RequestError
from stagepack_serving.server.messages import flag


@dataclass(slots=True, eq=False)
class Sequence:
    """What the calls of one sequence have written.

    Attributes:
        states: by the number of a stage, as it takes it; those that ran once have one.
        turn: held by the call that runs: the next one starts from what it has written.
        calls: how many of its calls are not answered yet.
        used: when the last one came or was answered, in seconds of `time.monotonic`.
    """

    states: dict[int, Any] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    calls: int = 0
    used: float = field(default_factory=time.monotonic)


class Sequences:
    """The sequences of one model."""

    def __init__(self, most: int, idle: float) -> None:
        """At most `most` are kept; one that is idle for `idle` seconds may have to go."""
        self._most = most
        self._idle = idle
        self._by_id: dict[int | str, Sequence] = {}

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._by_id)

    @contextlib.asynccontextmanager
    async def turn(self, parameters: Mapping[str, Any]) -> AsyncIterator[Sequence]:
        """The sequence that a request belongs to, when the calls before it are answered.

        What a call leaves half written is of no use: if it fails, or is given up, the sequence ends.

        Raises:
            RequestError: the request names none, or one that did not start, or there is no place for another.
        """
        name = self._name(parameters)
        start, end = flag(parameters, "sequence_start"), flag(parameters, "sequence_end")
        if start:
            self._by_id.pop(name, None)
            self._make_place()
            self._by_id[name] = Sequence()
        sequence = self._find(name)
        sequence.calls += 1
        ends = True
        try:
            async with sequence.turn:
                if self._find(name) is not sequence:
                    raise _gone(name)
                yield sequence
            ends = end
        finally:
            sequence.calls -= 1
            sequence.used = time.monotonic()
            if ends and self._by_id.get(name) is sequence:
                del self._by_id[name]

    def _name(self, parameters: Mapping[str, Any]) -> int | str:
        name = parameters.get("sequence_id", 0)
        if not isinstance(name, int | str) or isinstance(name, bool) or not name:
            raise RequestError(
                Reason.BAD_REQUEST,
                "the model keeps state from call to call: expected the parameter sequence_id, a number but 0 or a text, "
                f"found {name!r}; begin with sequence_start",
            )
        return name

    def _find(self, name: int | str) -> Sequence:
        if name not in self._by_id:
            raise _gone(name)
        return self._by_id[name]

    def _make_place(self) -> None:
        """Forget what is idle for too long, if a place is needed."""
        if len(self._by_id) < self._most:
            return
        now = time.monotonic()
        for name, sequence in list(self._by_id.items()):
            if not sequence.calls and now - sequence.used > self._idle:
                del self._by_id[name]
        if len(self._by_id) >= self._most:
            raise RequestError(
                Reason.BUSY,
                f"{self._most} sequences have their state here: end one by sequence_end, or come again later",
            )


def _gone(name: int | str) -> RequestError:
    message = "begin it with sequence_start; one that fails, takes too long or is idle for long is forgotten"
    return RequestError(Reason.BAD_REQUEST, f"there is no sequence {name!r}: {message}")
