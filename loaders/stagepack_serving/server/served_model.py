"""A version of a model that is served: checks requests, queues them, and builds the answers."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from stagepack.errors import InputError, StageLostError, StagepackError
from stagepack.format.reader import Bundle
from stagepack_loaders.adapter_calls import AdapterCalls
from stagepack_loaders.batching import BatchLimit, batch_limit
from stagepack_loaders.comparison import check_example_difference
from stagepack_loaders.decoders import check_token_slots, decoder_facts
from stagepack_loaders.elements import Array
from stagepack_loaders.example import replay_example
from stagepack_loaders.pipeline import CallablePipeline
from stagepack_loaders.versions import StageVersion
from stagepack_serving.protocol.interface import Interface
from stagepack_serving.server.admission import Admission
from stagepack_serving.server.errors import BadRequestError, RequestError, RequestStatus
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.metadata import FIRST_VERSION, model_metadata, served_model_config
from stagepack_serving.server.metrics import Metrics, VersionStatistics
from stagepack_serving.server.model_part import ModelPart, Part
from stagepack_serving.server.parameters import InferenceRequest, InferenceTensor, seconds_left, sequence_parameters
from stagepack_serving.server.scheduler import CallBatch, QueuedCall, Scheduler
from stagepack_serving.server.sequences import RequestSequence, SequenceTable

_LOG = logging.getLogger("stagepack.serve")


def _run_example(pipeline: CallablePipeline, *, check: bool) -> None:
    """Run the recorded example, and compare its results with the recorded ones."""
    difference = replay_example(pipeline)
    pipeline.reset_state()
    if check:
        check_example_difference(pipeline.bundle, difference, cure="--no-check-example serves it nevertheless")


class ServedModel:
    """A loaded bundle behind the protocol: one version of a model.

    Attributes:
        name: the name that clients use.
        version: the number of the version, as clients write it.
        pipeline: the loaded bundle.
        interface: its inputs and outputs.
        devices: the devices of its stages, each once.
        max_batch_size: the largest batch that requests are joined to; 1 if each request runs alone.
        weight_bytes: bytes of the weights of its stages.
        unbatched_reason: why each request runs alone although `ServerLimits.max_batch_size` allows more; empty if that is not so.
        admission: counts the requests that are not answered yet, and refuses those that would be answered too late.
        parts: what extensions have added to the model, by class; `part` returns one.
        on_sequence_start: called with the id of each sequence that a request starts.
        statistics: what the version has done.
        limits: the limits of the server.
        metrics: what the server has done.
        lane_count: the number of devices or processes, each of which works on a call of its own.
    """

    def __init__(
        self,
        name: str,
        pipeline: CallablePipeline,
        limits: ServerLimits,
        metrics: Metrics,
        *,
        version: str = FIRST_VERSION,
        check_example: bool = True,
    ) -> None:
        self.name = name
        self.version = version
        bundle = pipeline.bundle
        self.interface = Interface(bundle.entry_point)
        self._decoder = decoder_facts(bundle.entry_point)
        self.parts: dict[type[ModelPart], ModelPart] = {}
        self.on_sequence_start: Callable[[int | str], None] = lambda _: None
        self.devices = list(dict.fromkeys(pipeline.devices))
        self.weight_bytes = sum(stage.weight_bytes for stage in bundle.stages)
        self.limits = limits
        self._limit = pipeline.limit
        self.metrics = metrics
        self.pipeline = pipeline  # its processes end with it
        self.max_batch_size, self.unbatched_reason = self._try_out(pipeline, check_example=check_example)
        self.statistics = VersionStatistics(self.max_batch_size)
        stage_seconds = [
            metrics.stage_seconds.labels(name, version, str(number)) for number in range(len(bundle.stages))
        ]
        self._executor = pipeline.executor.overlapping(lambda number, seconds: stage_seconds[number].observe(seconds))
        self.lane_count = self._executor.lane_count
        self.admission = Admission(name, limits.max_pending_requests, self._executor.most_calls + 1)
        self._restart_count = self._executor.restart_count
        self._scheduler = Scheduler(
            self._executor,
            self.interface,
            max_batch_size=self.max_batch_size,
            batching_delay=limits.batching_delay,
            on_start=self._record_batch,
            on_end=self._count_batch,
        )
        self._sequences: SequenceTable | None = None
        if any(stage.state for stage in bundle.stages):
            end, start = self._scheduler.end_sequence, lambda sequence_id: self.on_sequence_start(sequence_id)
            self._sequences = SequenceTable(limits.max_sequences, limits.sequence_idle, on_end=end, on_start=start)

    def _try_out(self, pipeline: CallablePipeline, *, check_example: bool) -> BatchLimit:
        """Find out how large batches may be, and run the recorded example."""
        edges, largest_size = self.interface.edges, self.limits.max_batch_size
        # In a thread that ends: the threads of OpenMP that a thread makes stay with it, and when there are more than cores, the OpenMP
        # threads of all threads wait for each other in the kernel; a small decoder then takes 1.4 times as long.
        with ThreadPoolExecutor(1) as trial:
            limit = trial.submit(batch_limit, self.bundle, edges, largest_size, pipeline).result()
            if self.bundle.example is not None:
                trial.submit(_run_example, pipeline, check=check_example).result()
        if limit.reason:
            _LOG.info("%s: requests run alone: %s", self.name, limit.reason)
        elif limit.max_batch_size > 1:
            _LOG.debug("%s: batches of up to %d rows", self.name, limit.max_batch_size)
        return limit

    def part(self, kind: type[Part]) -> Part | None:
        """Return the part of a class; None if the model has none."""
        found = self.parts.get(kind)
        return found if isinstance(found, kind) else None

    @property
    def bundle(self) -> Bundle:
        """The bundle of the newest weights."""
        return self.pipeline.bundle

    @property
    def adapters(self) -> AdapterCalls:
        """The adapters that requests to come may choose."""
        return self.weights.adapters

    def adapter_named(self, model_name: str) -> str | None:
        """Return the adapter that a client names as a model of its own; None for the model itself."""
        if model_name != self.name and model_name not in self.adapters.names:  # it was unloaded since it was found
            message = f"unknown model {model_name!r}: it is no adapter of {self.name}"
            raise RequestError(RequestStatus.NOT_FOUND, message)
        return None if model_name == self.name else model_name

    @property
    def weights(self) -> StageVersion:
        """The newest version of the weights."""
        return self._executor.version

    def weights_with(self, other: "ServedModel") -> tuple[StageVersion, StageVersion]:
        """Return the newest version of the weights, here and of another model: of one version, if they are of one bundle."""
        return self._executor.updated.newest_with(other.pipeline.executor.updated)

    @property
    def sequence_count(self) -> int:
        """The number of sequences whose state is kept."""
        return len(self._sequences or ())

    @property
    def running_count(self) -> int:
        """The number of batches that run."""
        return self._scheduler.running_count

    @property
    def restart_count(self) -> int:
        """How often its processes were started again."""
        return self._executor.restart_count

    def has_sequence(self, sequence_id: object) -> bool:
        """Return whether the state of a sequence is kept here; `sequence_id` may be any parameter of a request."""
        return self._sequences is not None and sequence_id in self._sequences

    def end_sequence(self, sequence_id: int | str) -> None:
        """Free the state of a sequence, if this version has one of this id."""
        if self._sequences is not None:
            self._sequences.remove(sequence_id)

    def has_finished(self) -> bool:
        """Return whether no request and no sequence needs this version any more; sequences that are idle for too long are removed."""
        if self._sequences is not None:
            self._sequences.remove_idle()
        return not self.admission.pending_requests and not self.sequence_count

    def metadata(self, versions: Sequence[str]) -> dict[str, Any]:
        """Return the metadata of the model as the protocol defines it; see `model_metadata`."""
        return model_metadata(self.name, versions, self.interface)

    def config(self) -> ModelConfig:
        """Return the configuration of the model in Triton's format."""
        return served_model_config(
            self.name,
            self.version,
            self.interface,
            self.limits,
            max_batch_size=self.max_batch_size,
            has_state=self._sequences is not None,
            adapters=self.adapters.names,
        )

    async def infer(self, request: InferenceRequest, deadline: asyncio.Timeout) -> list[InferenceTensor]:
        """Run the model on a request."""
        self._check_availability()
        call = self._build_call(request)
        call.expiry = time.monotonic() + seconds_left(deadline)
        if self._sequences is None:
            arrays = await self._run(call, request.adapter)
        else:
            async with self._sequences.turn(*sequence_parameters(request.parameters)) as call.sequence:
                arrays = await self._run(call, request.adapter)
        output_names = self.interface.outputs if request.output_names is None else request.output_names
        outputs = [
            InferenceTensor(
                name=output_name, datatype=self.interface.outputs[output_name].datatype, array=arrays[output_name]
            )
            for output_name in output_names
        ]
        self.metrics.sent_bytes.labels(self.name, self.version).inc(sum(tensor.array.nbytes for tensor in outputs))
        return outputs

    def process_statuses(self) -> Mapping[int, Any]:
        """Return what the processes of the stages report about themselves."""
        return self._executor.process_statuses()

    @contextlib.asynccontextmanager
    async def reserve_sequence(self, weights: StageVersion | None = None) -> AsyncIterator[RequestSequence | None]:
        """Wait for a place for a sequence of calls, of a request that makes all of them, on the newest weights or on others.

        It yields the sequence; None for a model without state.
        """
        self._check_availability()
        if self._sequences is None:
            yield None
        else:
            async with self._sequences.reserve(weights) as sequence:
                yield sequence

    async def call(
        self,
        inputs: Mapping[str, Array],
        sequence: RequestSequence | None,
        finish: Callable[[Mapping[str, Array]], Any] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        weights: StageVersion | None = None,
    ) -> Any:
        """Run the model on inputs of the dtypes that it takes; return its outputs, or what `finish` makes of them.

        adapter: the adapter of all rows, or of each.
        weights: the version of the weights of a call without a sequence; None for that of the other calls of the request, or the newest.
        finish: called in the thread that has run the last stage, which calls wait for anyway: a thread of its own would take cores from it.
        """
        self._check_state(sequence)
        try:
            sizes = self._check_sizes(inputs, {input_name: array.shape for input_name, array in inputs.items()})
        except InputError as error:
            raise BadRequestError(f"{self.name}: {error}") from None
        call = QueuedCall(inputs=inputs, sizes=sizes, sequence=sequence, finish=finish, version=weights)
        result = await self._run(call, adapter)
        self._check_state(sequence)
        return result

    def unavailable_reason(self) -> str:
        """Return why the model answers no requests now; empty if it does."""
        return self._scheduler.failure or str(self._executor.lost or "")

    def has_ended(self) -> bool:
        """Return whether the model will answer no requests any more."""
        return bool(self._scheduler.failure) or self._executor.has_ended

    def refuses(self, seconds_left: float) -> bool:
        """Return whether a request is refused now that has to be answered in so many seconds; see `check_admission`."""
        return bool(self.unavailable_reason() or self.admission.refusal_reason(seconds_left))

    def check_admission(self, seconds_left: float) -> None:
        """Refuse a request before its body is read, if its answer would come too late, or not at all."""
        self._check_availability()
        self.admission.check(seconds_left)

    def _check_availability(self) -> None:
        """Forget sequences whose state is lost."""
        if reason := self.unavailable_reason():
            raise RequestError(RequestStatus.STAGE_LOST, f"{self.name}: {reason}")
        if (restart_count := self._executor.restart_count) != self._restart_count:
            self._restart_count = restart_count
            if self._sequences is not None:
                self._sequences.clear()

    def _check_state(self, sequence: RequestSequence | None) -> None:
        """Check that a sequence still has its state."""
        self._check_availability()
        if sequence is not None and self._sequences is not None and sequence not in self._sequences:
            raise RequestError(
                RequestStatus.STAGE_LOST,
                f"{self.name}: the state of the request is lost, since its processes were started again: try again",
            )

    def close(self, seconds: float) -> bool:
        """Finish the queued calls, end all sequences, and end the threads.

        seconds: how long to wait for them.
        """
        for part in self.parts.values():
            part.close()
        if self._sequences is not None:
            self._sequences.clear()
        has_ended = self._scheduler.close(seconds)
        if has_ended and self._executor is not self.pipeline.executor:
            self._executor.close()
        return has_ended

    def _build_call(self, request: InferenceRequest) -> QueuedCall:
        """Check a request, and make a call of it."""
        inputs = {tensor.name: tensor.array for tensor in request.inputs}
        try:
            edge_shapes, sizes = self._check_request(request)
        except InputError as error:
            raise BadRequestError(f"{self.name}: {error}") from None
        received_bytes = sum(array.nbytes for array in inputs.values())
        self.metrics.received_bytes.labels(self.name, self.version).inc(received_bytes)
        if self.max_batch_size == 1:
            return QueuedCall(inputs=inputs, sizes=sizes)
        batch_key = tuple(sorted((input_name, shape[1:]) for input_name, shape in edge_shapes.items()))
        batch_size = next(iter(edge_shapes.values()))[0]
        return QueuedCall(inputs=inputs, sizes=sizes, batch_key=batch_key, batch_size=batch_size)

    def _check_request(self, request: InferenceRequest) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
        """Check a request against the interface; return the shapes of the model's values by input name, and the sizes of the symbols."""
        arrays = {tensor.name: tensor.array for tensor in request.inputs}
        if len(arrays) < len(request.inputs):
            raise InputError(f"duplicate input: {', '.join(tensor.name for tensor in request.inputs)}")
        edge_shapes = {
            tensor.name: self.interface.check_input(tensor.name, tensor.datatype, tensor.array.shape)
            for tensor in request.inputs
        }
        sizes = self._check_sizes(arrays, edge_shapes)
        if self._decoder is not None:
            check_token_slots(self._decoder, arrays)
        self.interface.check_outputs(request.output_names or ())
        if request.max_answer_bytes is not None:
            output_names = self.interface.outputs if request.output_names is None else request.output_names
            request.check_answer_bytes(self.interface.output_bytes(output_names, sizes))
        return edge_shapes, sizes

    def _check_sizes(self, arrays: Mapping[str, Array], edge_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Check the inputs of a call against the boundary contract, and its values against their limit; return the sizes of the symbols."""
        sizes = self.interface.check_inputs(edge_shapes, self.interface.scalars(arrays))
        if self._limit is not None:
            self._limit.check(sizes)
        return sizes

    def _choose_version(self, call: QueuedCall, adapter: Any) -> None:
        """Choose the version that a call runs on, and find its adapters there: all calls of a request, and of a sequence, have one."""
        call.version = call.version or (call.record.weights if call.record is not None else None) or self.weights
        if (sequence := call.sequence) is not None:
            call.version = sequence.version = (sequence.state or sequence).version or call.version
        call.inputs = inputs = dict(call.inputs)
        call.version.adapters.add(inputs, call.sizes, adapter)
        if call.batch_key is not None and call.version.adapters.apart is not None:
            call.batch_key = call.batch_key, str(adapter)

    async def _run(self, call: QueuedCall, adapter: Any) -> Any:
        try:
            self._choose_version(call, adapter)
        except InputError as error:
            raise BadRequestError(f"{self.name}: {error}") from None
        self._scheduler.submit(call)
        try:
            return await asyncio.wrap_future(call.answer)
        except asyncio.CancelledError:
            self._scheduler.abandon(call)
            raise
        except TimeoutError:
            raise RequestError(RequestStatus.TOO_LATE, f"{self.name}: no answer before the deadline") from None
        except InputError as error:
            raise BadRequestError(f"{self.name}: {error}") from None
        except StageLostError as error:
            raise RequestError(RequestStatus.STAGE_LOST, f"{self.name}: {error}") from None
        except StagepackError as error:
            _LOG.warning("%s: %s", self.name, error)
            raise RequestError(RequestStatus.MODEL_FAILED, f"{self.name}: {error}") from error

    def _count_batch(self, batch: CallBatch) -> None:
        self.statistics.count_batch(batch.times, [call.arrival for call in batch.calls], batch.size)
        for call in batch.calls:
            if (timeline := call.timeline) is not None:
                timeline.end_run(call.arrival, batch.times)

    def _record_batch(self, batch: CallBatch) -> None:
        queue_seconds = self.metrics.queue_seconds.labels(self.name, self.version)
        for call in batch.calls:
            queue_seconds.observe(batch.times.start - call.arrival)
            if (timeline := call.timeline) is not None:
                timeline.begin_run(call.arrival, batch.times.start)
        self.metrics.batch_sizes.labels(self.name, self.version).observe(batch.size)
