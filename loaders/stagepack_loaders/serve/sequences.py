"""Sequences of calls to a model with state: each sees what its own calls have written, and nothing of others.

The request says which sequence it belongs to, by the parameters `sequence_id`, `sequence_start` and `sequence_end`. Source: Triton's
sequence extension, https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_sequence.md.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stagepack_loaders.serve.errors import Reason, RequestError


@dataclass(slots=True, eq=False)
class Sequence:
    """What the calls of one sequence have written.

    Attributes:
        states: of each stage, as it takes it.
        calls: how many of its calls are not answered yet.
        used: when the last one came or was answered, in seconds of `time.monotonic`.
    """

    states: list[Any]
    calls: int = 0
    used: float = field(default_factory=time.monotonic)


class Sequences:
    """The sequences of one model."""

    def __init__(self, fresh: Callable[[], list[Any]], most: int, idle: float) -> None:
        """`fresh` makes the states of a new one. At most `most` are kept; one that is idle for `idle` seconds may have to go."""
        self._fresh = fresh
        self._most = most
        self._idle = idle
        self._by_id: dict[int | str, Sequence] = {}

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._by_id)

    def of(self, parameters: Mapping[str, Any]) -> tuple[int | str, Sequence]:
        """The sequence that a request belongs to, and its name.

        Raises:
            RequestError: the request names none, or one that did not start, or there is no place for another.
        """
        name = parameters.get("sequence_id", 0)
        if not isinstance(name, int | str) or isinstance(name, bool) or not name:
            raise RequestError(
                Reason.BAD_REQUEST,
                "the model keeps state from call to call: expected the parameter sequence_id, a number but 0 or a text, "
                f"found {name!r}; begin with sequence_start",
            )
        if parameters.get("sequence_start"):
            self._by_id.pop(name, None)
            self._make_place()
            self._by_id[name] = Sequence(self._fresh())
        elif name not in self._by_id:
            raise RequestError(
                Reason.BAD_REQUEST,
                f"there is no sequence {name!r}: begin it with sequence_start; one that fails, takes too long or is idle for "
                f"{self._idle:g} s may be gone",
            )
        return name, self._by_id[name]

    def end(self, name: int | str, sequence: Sequence) -> None:
        """Forget a sequence, unless another one has its name by now."""
        if self._by_id.get(name) is sequence:
            del self._by_id[name]

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
