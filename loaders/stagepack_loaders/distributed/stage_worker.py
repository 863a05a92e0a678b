"""Runs the stages of one process on requests, in the order in which they come, and sends on what they return."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from stagepack.format.manifest import Edge, Manifest
from stagepack_loaders.base import LoadedStage, Runtime, stage_state
from stagepack_loaders.distributed.control import ControlKind, ControlMessage
from stagepack_loaders.distributed.process_group import ConnectionLostError, ProcessGroup, SentMessages
from stagepack_loaders.distributed.route_layout import RouteLayouts
from stagepack_loaders.distributed.routes import FRONT_RANK, Route
from stagepack_loaders.distributed.status import ProcessStatus, StageCounts
from stagepack_loaders.distributed.transfers import RouteReceiver, pack_failure, pack_values, send_messages
from stagepack_loaders.exchange import to_runtime
from stagepack_loaders.registry import find_runtime


@dataclass(slots=True, eq=False, kw_only=True)
class StageRequest:
    """A request on its way through the stages of one process.

    Attributes:
        message: its number, sequence and sizes.
        values: the values that the process has so far, by edge name.
        receivers: the receives of the values that it still waits for, by the stage that sends them.
        has_failed: whether a stage has failed on it.
        answer: at the front, set when the request is answered; its result is `values`.
    """

    message: ControlMessage
    values: dict[str, Any] = field(default_factory=dict)
    receivers: list[RouteReceiver] = field(default_factory=list)
    has_failed: bool = False
    answer: "Future[dict[str, Any]] | None" = None


class StageWorker:
    """The stages of one process, and a thread that runs them.

    While the thread runs a request, the values of the next ones arrive: their receives are posted by `begin`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        manifest: Manifest,
        stages: Mapping[int, LoadedStage],
        routes: Sequence[Route],
        layouts: RouteLayouts,
        *,
        in_flight: int,
        report_failure: Callable[[int, int, Exception], None],
        report_loss: Callable[[ConnectionLostError], None],
        finish_request: Callable[[StageRequest], None] = lambda _: None,
    ) -> None:
        """Start the thread.

        Args:
            group: the processes.
            manifest: the manifest of the bundle.
            stages: the stages of this process, by stage number.
            routes: all routes of the pipeline.
            layouts: their layouts.
            in_flight: the largest number of requests on their way. What was sent for the request so many before has arrived.
            report_failure: called with the number of a request and of a stage, and the error of the stage.
            report_loss: called when another process has gone; the thread ends.
            finish_request: called when the stages of this process have run.
        """
        self._group = group
        self._symbols = manifest.symbols
        self._layouts = layouts
        self._in_flight = in_flight
        self._sent_messages = SentMessages()
        self._stages = dict(stages)
        self._entries = manifest.stages
        self._runtimes: dict[int, Runtime] = {number: find_runtime(stage.runtime) for number, stage in stages.items()}
        self._edges: dict[str, Edge] = {edge.name: edge for edge in manifest.edges}
        self._incoming = [route for route in routes if route.target_rank == group.rank]
        self._outgoing: dict[int, list[Route]] = {number: [] for number in stages}
        for route in routes:
            if route.source_rank == group.rank and route.source_stage is not None:
                self._outgoing[route.source_stage].append(route)
        self._report_failure = report_failure
        self._report_loss = report_loss
        self._finish_request = finish_request
        self._sequence_states: dict[int, dict[int, Any]] = {}
        self._run_counts = dict.fromkeys(stages, 0)
        self._busy_seconds = dict.fromkeys(stages, 0.0)
        self._work: SimpleQueue[StageRequest | ControlMessage | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_work, name="stages", daemon=True)
        self._thread.start()

    def begin(self, request: StageRequest) -> None:
        """Post the receives of a request, and put it in the queue.

        Raises:
            ConnectionLostError: a process has gone.
            InputError: a tensor would have more elements than the format allows.
        """
        self._sent_messages.finish(request.message.number - self._in_flight)
        for route in self._incoming:
            layout = self._layouts.find(route, request.message.sizes)
            request.receivers.append(RouteReceiver(self._group, route, layout, self._symbols))
        self._work.put(request)

    def command(self, message: ControlMessage) -> None:
        """Put a command in the queue, which is executed after the requests before it."""
        self._work.put(message)

    def close(self) -> None:
        """Run what is in the queue, and end the thread."""
        self._work.put(None)
        self._thread.join()

    def finish_messages(self) -> None:
        """Wait until all that was sent has arrived.

        Raises:
            ConnectionLostError: a process has gone.
        """
        self._sent_messages.finish()

    def status(self) -> ProcessStatus:
        """Return what the stages have done."""
        return ProcessStatus(
            stages=tuple(
                StageCounts(stage=number, runs=self._run_counts[number], busy_seconds=self._busy_seconds[number])
                for number in self._stages
            ),
            pending_requests=self._work.qsize(),
            sequences=len(self._sequence_states),
            sent_bytes=self._group.sent_bytes,
        )

    def _run_work(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                if isinstance(work, StageRequest):
                    self._run_request(work)
                else:
                    self._execute(work)
        except ConnectionLostError as error:
            self._report_loss(error)
        except Exception as error:  # noqa: BLE001 - a process without this thread answers nothing any more
            self._report_loss(ConnectionLostError(f"{type(error).__name__}: {error}"))

    def _execute(self, message: ControlMessage) -> None:
        if message.kind == ControlKind.END_SEQUENCE:
            self._sequence_states.pop(message.sequence, None)
        elif message.kind == ControlKind.RESET_STATE:
            for stage in self._stages.values():
                stage.reset_state()
        elif message.kind == ControlKind.SEED:
            for runtime in dict.fromkeys(self._runtimes.values()):
                runtime.seed(message.number)

    def _run_request(self, request: StageRequest) -> None:
        for stage_number in self._stages:
            while request.receivers and _is_before(request.receivers[0].route, stage_number):
                collect_values(request)
            self._attempt(request, stage_number, partial(self._run_stage, stage_number, request))
            for route in self._outgoing[stage_number]:
                messages: list[torch.Tensor] = []
                self._attempt(request, stage_number, partial(self._pack, route, request, messages))
                if request.has_failed:
                    messages = pack_failure(self._layouts.find(route, request.message.sizes))
                self._sent_messages.add(request.message.number, send_messages(self._group, route, messages))
        self._finish_request(request)

    def _attempt(self, request: StageRequest, stage_number: int, action: Callable[[], None]) -> None:
        """Do something for a request unless it has failed. If that fails, the request has failed, and the others go on."""
        if request.has_failed:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a stage raises anything
            request.has_failed = True
            self._report_failure(request.message.number, stage_number, error)

    def _run_stage(self, stage_number: int, request: StageRequest) -> None:
        stage, runtime = self._stages[stage_number], self._runtimes[stage_number]
        entry, values = self._entries[stage_number], request.values
        for edge_name in entry.inputs:
            values[edge_name] = to_runtime(values[edge_name], self._edges[edge_name], runtime)
        inputs = [values[edge_name] for edge_name in entry.inputs]
        start_time = time.perf_counter()
        with runtime.inference():
            outputs = self._run_in_sequence(stage_number, stage, inputs, request.message.sequence)
            runtime.wait(stage.device)
        self._busy_seconds[stage_number] += time.perf_counter() - start_time
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

    def _pack(self, route: Route, request: StageRequest, messages: list[torch.Tensor]) -> None:
        # The next request may write the buffers that outputs are views of, before these have arrived.
        copies = route.source_stage is not None and bool(self._entries[route.source_stage].state)
        layout = self._layouts.find(route, request.message.sizes)
        messages.extend(pack_values(layout, request.values, self._symbols, copies=copies))


def collect_values(request: StageRequest) -> None:
    """Wait for the first receive of a request.

    Raises:
        ConnectionLostError: the process that sends has gone.
    """
    received_values = request.receivers.pop(0).wait()
    if received_values is None:
        request.has_failed = True
    else:
        request.values.update(received_values)


def _is_before(route: Route, stage_number: int) -> bool:
    """Whether a route brings values before a stage runs."""
    return route.target_rank != FRONT_RANK and (route.source_stage is None or route.source_stage < stage_number)
