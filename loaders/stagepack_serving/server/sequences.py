"""Sequences of requests to a model with state: each has a state of its own.

The parameters `sequence_id`, `sequence_start` and `sequence_end` of a request name its sequence. Source: Triton's sequence extension,
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_sequence.md.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

from stagepack_loaders.versions import CallSequence, StageVersion
from stagepack_serving.server.errors import BadRequestError, RequestError, RequestStatus

# How often a request that waits for a place looks for sequences that have become idle for too long.
_WATCH_SECONDS: Final = 0.2


@dataclass(slots=True, eq=False)
class RequestSequence:
    """A sequence and its state.

    Attributes:
        version: the version of the weights that all its requests run on; None for the newest at its first run.
        state: what `Executor.begin_sequence` returned; None before its first run.
        turn: held by the request that runs, so that the next one starts from the state that it leaves.
        pending_requests: the number of requests that are not answered yet.
        last_use: when the last request arrived or was answered, in seconds of `time.monotonic`.
    """

    version: StageVersion | None = None
    state: CallSequence | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    pending_requests: int = 0
    last_use: float = field(default_factory=time.monotonic)


class SequenceTable:
    """The sequences of one model."""

    def __init__(
        self,
        max_sequences: int,
        idle_seconds: float,
        on_end: Callable[[RequestSequence], None] = lambda _: None,
        on_start: Callable[[int | str], None] = lambda _: None,
    ) -> None:
        self._on_end = on_end
        self._on_start = on_start
        self._max_sequences = max_sequences
        self._idle_seconds = idle_seconds
        # A sequence of one request has no id: it is its own key.
        self._by_id: dict[int | str | RequestSequence, RequestSequence] = {}
        self._removed = asyncio.Event()
        self._place_turn = asyncio.Lock()

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self._by_id)

    def __contains__(self, sequence_id: object) -> bool:
        """Whether there is a sequence of this id."""
        return isinstance(sequence_id, int | str | RequestSequence) and sequence_id in self._by_id

    @contextlib.asynccontextmanager
    async def turn(self, sequence_id: int | str, is_start: bool, is_end: bool) -> AsyncIterator[RequestSequence]:
        """Wait until the earlier requests of the sequence are answered.

        The sequence ends with the context if the request says so, and if the body raises: the state may then be half written.
        """
        if is_start:
            self.remove(sequence_id)
            self._make_place()
            self._by_id[sequence_id] = RequestSequence()
            self._on_start(sequence_id)
        sequence = self._find(sequence_id)
        sequence.pending_requests += 1
        ends_now = True
        try:
            async with sequence.turn:
                if self._find(sequence_id) is not sequence:
                    raise _unknown_sequence(sequence_id)
                yield sequence
            ends_now = is_end
        finally:
            sequence.pending_requests -= 1
            sequence.last_use = time.monotonic()
            if ends_now and self._by_id.get(sequence_id) is sequence:
                self.remove(sequence_id)

    @contextlib.asynccontextmanager
    async def reserve(self, version: StageVersion | None = None) -> AsyncIterator[RequestSequence]:
        """Wait for a place for a sequence that one request calls the model with. First come, first served."""
        sequence = RequestSequence(version=version, pending_requests=1)
        async with self._place_turn:
            while not self._has_place():
                self._removed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WATCH_SECONDS):
                        await self._removed.wait()
            self._by_id[sequence] = sequence
        try:
            yield sequence
        finally:
            self.remove(sequence)

    def clear(self) -> None:
        """Remove all sequences: their state is lost."""
        for sequence_id in list(self._by_id):
            self.remove(sequence_id)

    def remove(self, sequence_id: int | str | RequestSequence) -> None:
        """Remove a sequence, if there is one of this id."""
        sequence = self._by_id.pop(sequence_id, None)
        if sequence is not None:
            self._removed.set()
            self._on_end(sequence)

    def _find(self, sequence_id: int | str) -> RequestSequence:
        if sequence_id not in self._by_id:
            raise _unknown_sequence(sequence_id)
        return self._by_id[sequence_id]

    def remove_idle(self) -> None:
        """Remove the sequences that are idle for too long."""
        now = time.monotonic()
        for sequence_id, sequence in list(self._by_id.items()):
            if not sequence.pending_requests and now - sequence.last_use > self._idle_seconds:
                self.remove(sequence_id)

    def _make_place(self) -> None:
        """Remove idle sequences if the table is full."""
        if not self._has_place():
            raise RequestError(
                RequestStatus.BUSY,
                f"the server keeps the state of {self._max_sequences} sequences already: end one with sequence_end, or try again later",
            )

    def _has_place(self) -> bool:
        """Whether the table has a place for one more sequence, after idle ones are removed if it is full."""
        if len(self._by_id) < self._max_sequences:
            return True
        self.remove_idle()
        return len(self._by_id) < self._max_sequences


def _unknown_sequence(sequence_id: int | str) -> RequestError:
    return BadRequestError(
        f"unknown sequence {sequence_id!r}: start it with sequence_start; a sequence ends when a request fails or times out, and may be "
        "evicted when it is idle"
    )
