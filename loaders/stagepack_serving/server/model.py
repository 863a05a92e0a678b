"""A bundle that is served: its requests checked, put in the queue, and answered."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.reader import Bundle
from stagepack_loaders import example
from stagepack_loaders.elements import Array
from stagepack_loaders.pipeline import Pipeline
from stagepack_serving.protocol.config import config_of
from stagepack_serving.protocol.interface import Interface
from stagepack_serving.protocol.rows import rows_at_once
from stagepack_serving.server.errors import Reason, RequestError
from stagepack_serving.server.limits import Limits
from stagepack_serving.server.messages import Request, Tensor
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.runner import StageRunner
from stagepack_serving.server.scheduler import Call, Scheduler
from stagepack_serving.server.sequences import Sequences

PLATFORM = "stagepack"

_LOG = logging.getLogger("stagepack.serve")


class Model:
    """A bundle behind the protocol.

    Attributes:
        name: what clients call it.
        version: there is one, ``"1"``.
        interface: its inputs and outputs.
        devices: where its stages are.
        batch: rows of several requests that run at once; 1 where they must not.
        alone: why only one request runs at once, if that is so and more were asked for.
        pending: requests that are not answered yet.
    """

    version = "1"

    def __init__(self, name: str, bundle: Bundle, pipeline: Pipeline, limits: Limits, metrics: Metrics) -> None:
        """Run the example once, so that the first request does not wait for what a first run does."""
        self.name = name
        self.bundle = bundle
        self.interface = Interface(bundle.manifest)
        self._limits = limits
        self._metrics = metrics
        self.pending = 0
        self.devices = list(dict.fromkeys(str(stage.device) for stage in pipeline.stages))
        ends = [spec.edge for spec in (*self.interface.inputs.values(), *self.interface.outputs.values())]
        self.batch, self.alone = rows_at_once(bundle, ends, limits.batch, pipeline)
        if bundle.example is not None:
            given, _ = example.read_example(pipeline, bundle)
            example.run_on_inputs(pipeline, given)
            pipeline.reset_state()
        self._runner = StageRunner(name, pipeline, self.interface, metrics)
        stateful = any(stage.state for stage in bundle.stages)
        self._sequences = Sequences(limits.sequences, limits.idle) if stateful else None
        self._scheduler = Scheduler(
            self._runner, lanes(pipeline), rows=self.batch, delay=limits.delay, taken=self._taken
        )
        metrics.pending.labels(name).set_function(lambda: self.pending)
        metrics.sequences.labels(name).set_function(lambda: len(self._sequences or ()))

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """A place among the requests that are not answered yet.

        Raises:
            RequestError: there are too many.
        """
        if self.pending >= self._limits.queue:
            raise RequestError(Reason.BUSY, f"{self.name}: {self.pending} requests wait already: come again later")
        self.pending += 1
        try:
            yield
        finally:
            self.pending -= 1

    def metadata(self) -> dict[str, Any]:
        """Its inputs and outputs in the words of the protocol."""
        ends = {"inputs": self.interface.inputs, "outputs": self.interface.outputs}
        return {"name": self.name, "versions": [self.version], "platform": PLATFORM} | {
            key: [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs.values()]
            for key, specs in ends.items()
        }

    def config(self) -> ModelConfig:
        """Its configuration in the words of Triton."""
        rows = self.batch if self.batch > 1 else 0
        config = config_of(self.name, self.interface.inputs.values(), self.interface.outputs.values(), max_batch=rows)
        config.platform = PLATFORM
        config.version_policy.specific.versions.append(int(self.version))
        if rows:
            config.dynamic_batching.max_queue_delay_microseconds = round(self._limits.delay * 1e6)
        if self._sequences is not None:
            config.sequence_batching.oldest.max_candidate_sequences = self._limits.sequences
            config.sequence_batching.max_sequence_idle_microseconds = round(self._limits.idle * 1e6)
        return config

    async def infer(self, request: Request, deadline: asyncio.Timeout) -> list[Tensor]:
        """Answer a request: the outputs that it asks for. If it says how long its client waits, the deadline is moved nearer.

        Raises:
            RequestError: it does not fit the model, or the model fails on it.
        """
        call = self._call(request)
        hasten(deadline, _timeout(request.parameters))
        if self._sequences is None:
            outputs = await self._answer(call)
        else:
            async with self._sequences.turn(request.parameters) as call.sequence:
                outputs = await self._answer(call)
        wanted = self.interface.outputs if request.outputs is None else request.outputs
        answer = [
            Tensor(name=name, datatype=self.interface.outputs[name].datatype, array=outputs[name]) for name in wanted
        ]
        self._metrics.sent.labels(self.name).inc(sum(tensor.array.nbytes for tensor in answer))
        return answer

    def _call(self, request: Request) -> Call:
        """The request as a call.

        Raises:
            RequestError: it does not fit the model.
        """
        inputs = {tensor.name: tensor.array for tensor in request.inputs}
        if len(inputs) < len(request.inputs):
            given = ", ".join(tensor.name for tensor in request.inputs)
            raise RequestError(Reason.BAD_REQUEST, f"{self.name}: an input is given twice: {given}")
        try:
            shapes = {
                tensor.name: self.interface.check(tensor.name, tensor.datatype, tensor.array.shape)
                for tensor in request.inputs
            }
            numbers = {
                name: inputs[name].item() for name in shapes if self.interface.inputs[name].edge.dtype in SCALAR_DTYPES
            }
            self.interface.check_all(shapes, numbers)
            self.interface.check_outputs(request.outputs or ())
        except InputError as error:
            raise RequestError(Reason.BAD_REQUEST, f"{self.name}: {error}") from None
        self._metrics.received.labels(self.name).inc(sum(tensor.array.nbytes for tensor in request.inputs))
        if self.batch == 1:
            return Call(inputs=inputs)
        kind = tuple(sorted((name, shape[1:]) for name, shape in shapes.items()))
        return Call(inputs=inputs, kind=kind, rows=next(iter(shapes.values()))[0])

    async def _answer(self, call: Call) -> Mapping[str, Array]:
        self._scheduler.submit(call)
        try:
            return await asyncio.wrap_future(call.answer)
        except asyncio.CancelledError:
            call.given_up = True
            raise
        except InputError as error:
            raise RequestError(Reason.BAD_REQUEST, f"{self.name}: {error}") from None
        except Exception as error:
            message = f"{self.name}: the model fails on these inputs: {type(error).__name__}: {error}"
            _LOG.warning("%s", message)
            raise RequestError(Reason.MODEL_FAILED, message) from error

    def _taken(self, calls: Sequence[Call]) -> None:
        now = time.monotonic()
        queued = self._metrics.queued.labels(self.name)
        for call in calls:
            queued.observe(now - call.arrived)
        self._metrics.rows.labels(self.name).observe(sum(call.rows for call in calls))

    def close(self, seconds: float) -> bool:
        """End its threads, when what they work on is done; whether that was so before these seconds were over."""
        return self._scheduler.close(seconds)


def _timeout(parameters: Mapping[str, Any]) -> float:
    """How long the client waits, in seconds; without end, if it does not say.

    Raises:
        RequestError: it says no number of microseconds.
    """
    found = parameters.get("timeout", 0)
    if type(found) is not int or found < 0:
        raise RequestError(Reason.BAD_REQUEST, f"the parameter timeout: expected microseconds, found {found!r}")
    return found / 1e6 if found else math.inf


def hasten(deadline: asyncio.Timeout, seconds: float) -> None:
    """Move a deadline so near, if it is not nearer yet."""
    when, now = deadline.when(), asyncio.get_running_loop().time()
    if when is None or now + seconds < when:
        deadline.reschedule(now + seconds)


def lanes(pipeline: Pipeline) -> list[list[int]]:
    """Consecutive stages on one device: each such run can work on a batch of its own."""
    found: list[list[int]] = []
    for number, stage in enumerate(pipeline.stages):
        if found and str(pipeline.stages[number - 1].device) == str(stage.device):
            found[-1].append(number)
        else:
            found.append([number])
    return found
