"""Runs the stages of one process on requests, one after another, and sends on what they return."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stagepack.format.manifest import Edge, EntryPoint
from stagepack_loaders.base import LoadedStage, Runtime, stage_state
from stagepack_loaders.distributed.control import ControlKind, ControlMessage
from stagepack_loaders.distributed.membership import Membership
from stagepack_loaders.distributed.packing import PackedValues, pack_command, pack_failure, pack_values
from stagepack_loaders.distributed.process_group import SentMessages
from stagepack_loaders.distributed.route_layout import RequestLayout
from stagepack_loaders.distributed.routes import Route
from stagepack_loaders.distributed.status import StageCounts
from stagepack_loaders.distributed.transfers import RouteSenders
from stagepack_loaders.exchange import to_runtime
from stagepack_loaders.registry import find_runtime
from stagepack_loaders.run_trace import SpanRecorder, trace_clock
from stagepack_loaders.stage_errors import typed_stage_errors

# What was sent for the request so many before has arrived before another one is run: a slow process holds up those before it.
_REQUESTS_SENT_AHEAD = 4
_NANOSECONDS = 1e9  # in a second


@dataclass(slots=True, eq=False, kw_only=True)
class StageRequest:
    """A request on its way through the stages of one process.

    Attributes:
        message: its number, sequence and sizes. Its kind is `FAIL` when a stage has failed on it.
        layout: how its values travel.
        values: the values that the process has so far, by edge name.
    """

    message: ControlMessage
    layout: RequestLayout
    values: dict[str, Any] = field(default_factory=dict)


class StageWorker:
    """The stages of one process. One thread uses it; `stage_counts` and `sequence_count` may be read from others."""

    def __init__(
        self,
        entry_point: EntryPoint,
        membership: Membership,
        senders: RouteSenders,
        report_failure: Callable[[int, int, Exception], None],
        spans: SpanRecorder,
    ) -> None:
        """Keep what the stages need.

        Args:
            entry_point: the entry point of the bundle.
            membership: this process in the group, with its stages.
            senders: send on what the stages return.
            report_failure: called with the number of a request and of a stage, and the error of the stage.
            spans: records what the stages do.
        """
        self._senders = senders
        self._symbols = entry_point.symbols
        self._sent_messages = SentMessages()
        self._stages = stages = dict(membership.stages)
        self._entries = entry_point.stages
        self._runtimes: dict[int, Runtime] = {number: find_runtime(stage.runtime) for number, stage in stages.items()}
        self._edges: dict[str, Edge] = {edge.name: edge for edge in entry_point.edges}
        self._outgoing: dict[int, list[Route]] = {number: [] for number in stages}
        for route in membership.routes:
            if route.source_rank == membership.group.rank and route.source_stage is not None:
                self._outgoing[route.source_stage].append(route)
        self._report_failure = report_failure
        self._spans = spans
        self._last_stage = max(stages, default=None)
        self._sequence_states: dict[int, dict[int, Any]] = {}
        self._run_counts = dict.fromkeys(stages, 0)
        self._busy_seconds = dict.fromkeys(stages, 0.0)

    @property
    def stage_counts(self) -> tuple[StageCounts, ...]:
        """What the stages have done."""
        return tuple(
            StageCounts(stage=number, runs=self._run_counts[number], busy_seconds=self._busy_seconds[number])
            for number in self._stages
        )

    @property
    def sequence_count(self) -> int:
        """The number of sequences whose state is kept."""
        return len(self._sequence_states)

    def run_request(self, request: StageRequest) -> None:
        """Run the stages on a request, and send on their outputs.

        Raises:
            ConnectionLostError: a process has gone.
        """
        for stage_number in self._stages:
            self._attempt(request, stage_number, partial(self._run_stage, stage_number, request))
            for route in self._outgoing[stage_number]:
                self._send_values(stage_number, route, request)
        start = trace_clock()
        self._sent_messages.finish(request.message.number - _REQUESTS_SENT_AHEAD)
        self._spans.add("wait", request.message.number, start, self._last_stage)

    def execute(self, command: ControlMessage) -> None:
        """Send on a command, and do what it says.

        Raises:
            ConnectionLostError: a process has gone.
        """
        for route in itertools.chain.from_iterable(self._outgoing.values()):
            self._send(route, command, pack_command(self._symbols))
        if command.kind == ControlKind.END_SEQUENCE:
            self._sequence_states.pop(command.sequence, None)
        elif command.kind == ControlKind.RESET_STATE:
            for stage in self._stages.values():
                stage.reset_state()
        elif command.kind == ControlKind.SEED:
            for runtime in dict.fromkeys(self._runtimes.values()):
                runtime.seed(command.seed)
        elif command.kind == ControlKind.CLOSE:
            self._sent_messages.finish()

    def _send_values(self, stage_number: int, route: Route, request: StageRequest) -> None:
        start = trace_clock()
        packed_values: list[PackedValues] = []
        self._attempt(request, stage_number, lambda: packed_values.append(self._pack(route, request)))
        if not packed_values:
            packed_values.append(pack_failure(request.layout.of_route[route]))
        self._send(route, request.message, packed_values[0])
        byte_count = packed_values[0].byte_count if self._spans.is_on else 0
        self._spans.add("transfer", request.message.number, start, stage_number, byte_count)

    def _send(self, route: Route, message: ControlMessage, packed_values: PackedValues) -> None:
        self._sent_messages.add(message.number, self._senders.send(route, message, packed_values))

    def _attempt(self, request: StageRequest, stage_number: int, action: Callable[[], None]) -> None:
        """Do something for a request unless it has failed. If that fails, the request has failed, and the others go on."""
        if request.message.kind == ControlKind.FAIL:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a stage raises anything
            request.message = request.message.failed()
            self._report_failure(request.message.number, stage_number, error)

    def _run_stage(self, stage_number: int, request: StageRequest) -> None:
        stage, runtime = self._stages[stage_number], self._runtimes[stage_number]
        entry, values = self._entries[stage_number], request.values
        conversion_start = trace_clock()
        for edge_name in entry.inputs:
            values[edge_name] = to_runtime(values[edge_name], self._edges[edge_name], runtime)
        inputs = [values[edge_name] for edge_name in entry.inputs]
        start = trace_clock()
        self._spans.add("transfer", request.message.number, conversion_start, stage_number, end=start)
        try:
            with typed_stage_errors(stage_number), runtime.inference():
                outputs = self._run_in_sequence(stage_number, stage, inputs, request.message.sequence)
                runtime.wait(stage.device)
        finally:
            self._spans.add("compute", request.message.number, start, stage_number)
        self._busy_seconds[stage_number] += (trace_clock() - start) / _NANOSECONDS
        self._run_counts[stage_number] += 1
        values.update(zip(entry.outputs, outputs, strict=True))

    def _run_in_sequence(
        self, stage_number: int, stage: LoadedStage, inputs: list[Any], sequence: int
    ) -> tuple[Any, ...]:
        """Run a stage with the state of a sequence."""
        if not sequence or not self._entries[stage_number].state:
            return stage.run(inputs)
        with stage_state(stage, stage_number, self._sequence_states.setdefault(sequence, {})):
            return stage.run(inputs)

    def _pack(self, route: Route, request: StageRequest) -> PackedValues:
        # The next request may write the buffers that outputs are views of, before these have arrived.
        has_state = route.source_stage is not None and bool(self._entries[route.source_stage].state)
        copies = has_state and not self._senders.copies_at_once(route)
        return pack_values(request.layout.of_route[route], request.values, self._symbols, copies=copies)
