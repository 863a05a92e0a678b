"""Calls that wait -> batches that run, one after another on each device, and on several devices at once."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Queue
from typing import Any, Protocol

import numpy

from stagepack_loaders.elements import Array


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """A request that waits for its run.

    Attributes:
        inputs: by edge name, as they travelled.
        kind: calls of one kind may run as one batch, row after row; None runs alone.
        rows: how many rows it brings.
        sequence: what its sequence of calls has written, for the runner.
        given_up: nobody waits for the answer any more.
        arrived: when, in seconds of `time.monotonic`.
        answer: the outputs by name, as they will travel.
    """

    inputs: Mapping[str, Array]
    kind: Hashable = None
    rows: int = 1
    sequence: Any = None
    given_up: bool = False
    arrived: float = field(default_factory=time.monotonic)
    answer: "Future[Mapping[str, Array]]" = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class Batch:
    """Calls that run as one, and the values they are at."""

    calls: Sequence[Call]
    values: Any = None


class Runner(Protocol):
    """What runs a batch: the stages of a model."""

    def begin(self, inputs: Mapping[str, Array]) -> Any:
        """The values that the first stage starts from."""

    def run(self, stage: int, values: Any, sequence: Any) -> None:
        """Run a stage; it changes the values."""

    def end(self, values: Any, sequence: Any) -> Mapping[str, Array]:
        """The outputs by name."""


class Scheduler:
    """Runs calls on threads of its own: one a lane, which is a run of consecutive stages on one device.

    While the second lane runs a batch, the first runs the next.
    """

    def __init__(
        self,
        runner: Runner,
        lanes: Sequence[Sequence[int]],
        *,
        rows: int,
        delay: float,
        taken: Callable[[Sequence[Call]], None],
    ) -> None:
        """A batch takes at most `rows` rows, and waits for `delay` seconds; `taken` is told of each when it begins."""
        self._runner = runner
        self._lanes = lanes
        self._rows = rows
        self._delay = delay
        self._taken = taken
        self._waiting: deque[Call] = deque()
        self._changed = threading.Condition()
        self._closed = False
        # A lane that is ahead waits: meanwhile calls gather, and become larger batches.
        self._inboxes: list[Queue[Batch | None]] = [Queue(maxsize=1) for _ in lanes[1:]]
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), name=f"lane-{number}", daemon=True)
            for number in range(len(lanes))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Call) -> None:
        """Put a call in the queue."""
        with self._changed:
            self._waiting.append(call)
            self._changed.notify()

    def close(self, seconds: float) -> bool:
        """Run what waits, and end the threads; whether they ended before these seconds were over."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, lane: int) -> None:
        while (batch := self._take() if lane == 0 else self._inboxes[lane - 1].get()) is not None:
            try:
                self._advance(batch, lane)
            except Exception as error:  # noqa: BLE001 - a bug here must not end the thread
                for call in batch.calls:
                    if not call.answer.done():
                        call.answer.set_exception(error)
        if lane < len(self._inboxes):
            self._inboxes[lane].put(None)

    def _take(self) -> Batch | None:
        """The call that came first, and others that may join it."""
        with self._changed:
            first = self._first()
            if first is None:
                return None
            calls, rows = [first], first.rows
            while first.kind is not None:
                for call in list(self._waiting):
                    if call.kind == first.kind and rows + call.rows <= self._rows:
                        self._waiting.remove(call)
                        if call.answer.set_running_or_notify_cancel():
                            calls.append(call)
                            rows += call.rows
                left = first.arrived + self._delay - time.monotonic()
                if rows >= self._rows or left <= 0 or self._closed:
                    break
                self._changed.wait(left)
        return Batch(calls)

    def _first(self) -> Call | None:
        """The first call that somebody still waits for; None when there will be no more."""
        while True:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            call = self._waiting.popleft()
            if call.answer.running() or call.answer.set_running_or_notify_cancel():
                return call

    def _advance(self, batch: Batch, lane: int) -> None:
        """Run a batch on a lane; give it to the next one, or its outputs to those who wait."""
        runner, calls = self._runner, batch.calls
        if all(call.given_up for call in calls):
            return
        try:
            if lane == 0:
                self._taken(calls)
                batch.values = runner.begin(_join([call.inputs for call in calls]))
            for stage in self._lanes[lane]:
                runner.run(stage, batch.values, calls[0].sequence)
            if lane < len(self._inboxes):
                self._inboxes[lane].put(batch)
                return
            outputs = runner.end(batch.values, calls[0].sequence)
        except Exception as error:  # noqa: BLE001 - whatever the model raises is told to whoever called it
            if len(calls) == 1:
                calls[0].answer.set_exception(error)
            else:  # the inputs of one must not fail the others
                self._again(calls)
            return
        if len(calls) == 1:
            calls[0].answer.set_result(outputs)
            return
        ends = list(itertools.accumulate(call.rows for call in calls))
        for call, end in zip(calls, ends, strict=True):
            call.answer.set_result({name: array[end - call.rows : end] for name, array in outputs.items()})

    def _again(self, calls: Sequence[Call]) -> None:
        """Let each of these calls run alone, before others."""
        for call in calls:
            call.kind = None
        with self._changed:
            self._waiting.extendleft(reversed(calls))
            self._changed.notify()


def _join(inputs: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    if len(inputs) == 1:
        return inputs[0]
    return {name: numpy.concatenate([one[name] for one in inputs]) for name in inputs[0]}
