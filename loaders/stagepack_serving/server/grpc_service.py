"""The protocol over gRPC.

Source: https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_grpc.md, with Triton's additions. The
generated service comes from `tritonclient`. The health service of gRPC, which orchestrators and clients ask before they send requests:
https://github.com/grpc/grpc/blob/master/doc/health-checking.md.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer

from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.extensions import server_extensions
from stagepack_serving.server.grpc_calls import RequestStream, check_call_authorization
from stagepack_serving.server.grpc_messages import (
    ParsedInference,
    decode_grpc_request,
    decode_parameters,
    encode_grpc_response,
    encode_stream_response,
    parameter_value,
    typed_bytes,
)
from stagepack_serving.server.log_settings import update_log_settings
from stagepack_serving.server.metadata import server_metadata
from stagepack_serving.server.model_control import ModelControl
from stagepack_serving.server.model_registry import ModelRegistry
from stagepack_serving.server.parameters import (
    check_request_id,
    named_adapter,
    refuse_load_parameters,
    shorten_deadline,
)
from stagepack_serving.server.rest_large_request import beside_loop
from stagepack_serving.server.security import TokenCheck

_LOG: Final = logging.getLogger("stagepack.serve")
# The service that answers inferences; an empty name is the whole server.
INFERENCE_SERVICE: Final = "inference.GRPCInferenceService"
_SERVER_SERVICES: Final = ("", INFERENCE_SERVICE)
_WATCH_SECONDS: Final = 0.2


class GrpcService(GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated, without types
    """The supported methods of the service; the others answer UNIMPLEMENTED."""

    def __init__(self, control: ModelControl) -> None:
        self._control = control
        self._models = control.models

    # The protocol defines the names and the effects of the methods. A RequestError that one raises becomes the status of its call.

    async def ServerLive(self, _: Any, context: Any) -> Any:  # noqa: D102, N802
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, _: Any, context: Any) -> Any:  # noqa: D102, N802
        return pb.ServerReadyResponse(ready=self._models.is_ready)

    async def ServerMetadata(self, _: Any, context: Any) -> Any:  # noqa: D102, N802
        return pb.ServerMetadataResponse(**server_metadata())

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        return pb.ModelReadyResponse(ready=self._models.is_model_ready(request.name, request.version))

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        metadata = self._models.metadata(request.name, request.version)
        return pb.ModelMetadataResponse(**metadata)

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        return pb.ModelConfigResponse(config=self._models.find_named(request.name, request.version).config())

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        return pb.RepositoryIndexResponse(models=await self._control.index(ready_only=request.ready))

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        refuse_load_parameters(request.parameters)
        await self._control.load(request.model_name)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        await self._control.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()

    async def ModelStatistics(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        return pb.ModelStatisticsResponse(**self._models.statistics(request.name, request.version))

    async def LogSettings(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        changes = {name: parameter_value(value) for name, value in request.settings.items()}
        if changes:
            self._control.check_changes_allowed()
        settings = update_log_settings(changes)
        return pb.LogSettingsResponse(settings={name: _setting_message(value) for name, value in settings.items()})

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        responses: list[bytes] = []

        async def keep(response: bytes) -> None:
            responses.append(response)

        self._check_size(request)
        await self._answer(request, context, keep, streams=False)
        return responses[0]

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: D102, N802
        responses: asyncio.Queue[bytes | None] = asyncio.Queue()
        # Bounds the requests whose answers are not sent yet.
        unsent_answers = asyncio.Semaphore(self._models.limits.max_pending_requests)
        reading = asyncio.create_task(self._answer_stream(requests, responses, unsent_answers, context))
        reading.add_done_callback(lambda _: responses.put_nowait(None))
        try:
            while (response := await responses.get()) is not None:
                yield response
                unsent_answers.release()
            await reading
        finally:
            reading.cancel()
            # Now, and not when the garbage collector comes: they may be large.
            while not responses.empty():
                responses.get_nowait()

    async def _answer_stream(
        self,
        requests: RequestStream,
        responses: asyncio.Queue[bytes | None],
        unsent_answers: asyncio.Semaphore,
        context: Any,
    ) -> None:
        """Answer the requests of a stream at the same time, so that they can be batched."""

        async def answer(request: ParsedInference) -> None:
            record = requests.begin_record()
            has_place = True  # of the first response: the loop below has waited for it

            async def put(response: bytes) -> None:
                nonlocal has_place
                if not has_place:
                    await unsent_answers.acquire()
                has_place = False
                record.answer_bytes += len(response)
                responses.put_nowait(encode_stream_response(response))

            try:
                with requests.working():
                    await self._answer(request, context, put, streams=True)
                record.write("OK")
            except asyncio.CancelledError:
                record.write("HUNG_UP")
                raise
            except RequestError as error:
                record.write(error.status.name)
                if not has_place:
                    await unsent_answers.acquire()
                infer_response = pb.ModelInferResponse(id=request.message.id)
                refusal = pb.ModelStreamInferResponse(error_message=str(error), infer_response=infer_response)
                responses.put_nowait(refusal.SerializeToString())

        try:
            async with asyncio.TaskGroup() as running:
                async for request in _until_stopping(self._models.stopping, requests):
                    self._check_size(request)
                    await unsent_answers.acquire()
                    running.create_task(answer(request))
        except ExceptionGroup as errors:
            if (refused := errors.subgroup(RequestError)) is not None:  # a message, which ends the stream
                raise refused.exceptions[0] from None
            raise

    def _check_size(self, request: ParsedInference) -> None:
        """Refuse a request that is too large, before it is decoded."""
        try:
            model = self._models.find_named(request.message.model_name, request.message.model_version)
        except RequestError:
            return  # it is refused, and counted, when it is answered
        for extension in server_extensions():
            extension.check_size(model, request)

    async def _answer(
        self, request: ParsedInference, context: Any, send: Callable[[bytes], Awaitable[None]], *, streams: bool
    ) -> None:
        """Answer a request."""
        message = request.message
        try:
            async with self._models.request_scope(message.model_name, message.model_version, "grpc") as scope:
                scope.timeline.enter("decode")
                if (remaining_seconds := context.time_remaining()) is not None:
                    shorten_deadline(scope.deadline, remaining_seconds)
                check_request_id(message.id)
                for name, value in named_adapter(decode_parameters(message.parameters), scope.adapter).items():
                    message.parameters[name].string_param = value
                with scope.reserve_place(decode_parameters(message.parameters)) as model:
                    answers = (extension.grpc_answer(model, request) for extension in server_extensions())
                    if (answer := next(filter(None, answers), None)) is not None:

                        async def send_part(response: bytes) -> None:
                            scope.has_begun = lambda: True
                            await send(response)

                        scope.timeline.enter("generate")
                        await answer(scope.deadline, send_part, streams)
                        return
                    inference_request = await beside_loop(typed_bytes(message), decode_grpc_request, request)
                    outputs = await model.infer(inference_request, scope.deadline)
                    scope.timeline.enter("encode")
                    # Before the run, the sizes that depend on data were not known.
                    inference_request.check_answer_bytes(sum(tensor.array.nbytes for tensor in outputs))
                response = encode_grpc_response(model.name, model.version, message.id, outputs)
                scope.timeline.enter("send")
                await send(response)
        except RequestError:
            raise
        except Exception as error:
            _LOG.exception("%s: a bug in stagepack", message.model_name)
            raise RequestError(RequestStatus.MODEL_FAILED, f"a bug in stagepack: {error!r}") from error


def _setting_message(value: Any) -> Any:
    field_name = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
    return pb.LogSettingsResponse.SettingValue(**{field_name: value})


async def _until_stopping(stopping: asyncio.Event, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The requests of a stream, until the client ends it or the server stops to accept requests."""
    stop_task, iterator = asyncio.ensure_future(stopping.wait()), aiter(requests)
    tasks: set[asyncio.Task[Any]] = {stop_task}
    try:
        while True:
            next_task = asyncio.ensure_future(anext(iterator, None))
            tasks = {next_task, stop_task}
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not next_task.done() or (request := next_task.result()) is None:
                return
            yield request
    finally:
        for task in tasks:
            task.cancel()


class HealthService(HealthServicer):  # type: ignore[misc]  # generated, without types
    """Says whether the server takes requests, as ``/v2/health/ready`` does, and whether a model does, by its name as the service."""

    def __init__(self, models: ModelRegistry, check_token: TokenCheck | None = None) -> None:
        self._models = models
        self._check_token = check_token

    # The protocol defines the names and the effects of the methods.

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        if request.service not in _SERVER_SERVICES:
            self._require_token(context)
        status = self._status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            expected = f"expected {INFERENCE_SERVICE}, a loaded model, or an empty name"
            raise RequestError(RequestStatus.NOT_FOUND, f"unknown service {request.service!r}: {expected}")
        return HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: D102, N802
        sent_status = None
        while not self._models.stopping.is_set():
            status = self._status(request.service)
            if status != sent_status:
                # The token may have been withdrawn since the call began.
                self._require_token(context)
                sent_status = status
                yield HealthCheckResponse(status=status)
            await asyncio.sleep(_WATCH_SECONDS)

    def _require_token(self, context: Any) -> None:
        if self._check_token is not None:
            check_call_authorization(self._check_token, context)

    def _status(self, service: str) -> int:
        if service in _SERVER_SERVICES:
            is_ready = self._models.is_ready
        elif service in {model.name for model in self._models.serving} | self._models.adapter_names.keys():
            is_ready = self._models.is_model_ready(service)
        else:
            return int(HealthCheckResponse.SERVICE_UNKNOWN)
        return int(HealthCheckResponse.SERVING if is_ready else HealthCheckResponse.NOT_SERVING)
