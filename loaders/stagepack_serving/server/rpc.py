"""The protocol over gRPC.

Source: https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_grpc.md, with Triton's additions, of
which `tritonclient` ships the service.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer

from stagepack_serving.server.errors import Reason, RequestError
from stagepack_serving.server.messages import Request, Tensor, check_memory, from_bytes, from_numbers
from stagepack_serving.server.metadata import server_metadata
from stagepack_serving.server.model import hasten
from stagepack_serving.server.models import Models

# Datatype -> the field of InferTensorContents that holds its elements.
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


class RpcServer(GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated, without types
    """The methods of the service that this server has; the others answer UNIMPLEMENTED."""

    def __init__(self, models: Models) -> None:
        """Answer for these models."""
        self._models = models

    async def ServerLive(self, _: Any, context: Any) -> Any:  # noqa: D102, N802 - named by the protocol; so the others
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, _: Any, context: Any) -> Any:  # noqa: D102, N802
        return pb.ServerReadyResponse(ready=self._models.ready)

    async def ServerMetadata(self, _: Any, context: Any) -> Any:  # noqa: D102, N802
        return pb.ServerMetadataResponse(**server_metadata())

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        await self._find(request.name, request.version, context)
        return pb.ModelReadyResponse(ready=self._models.ready)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        return pb.ModelMetadataResponse(**(await self._find(request.name, request.version, context)).metadata())

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        return pb.ModelConfigResponse(config=(await self._find(request.name, request.version, context)).config())

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        try:
            return await self._infer(request, context.time_remaining())
        except RequestError as error:
            await context.abort(error.reason.grpc, str(error))

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: D102, N802
        answers: asyncio.Queue[Any] = asyncio.Queue()
        places = asyncio.Semaphore(self._models.limits.queue)  # of requests whose answers are not sent yet

        async def answer(request: Any) -> None:
            response = pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse(id=request.id))
            try:
                response.infer_response.CopyFrom(await self._infer(request, context.time_remaining()))
            except RequestError as error:
                response.error_message = str(error)
            answers.put_nowait(response)

        async def read() -> None:
            async with asyncio.TaskGroup() as running:
                async for request in _until(self._models.stopping, requests):
                    await places.acquire()
                    running.create_task(answer(request))

        reading = asyncio.create_task(read())
        reading.add_done_callback(lambda _: answers.put_nowait(None))
        try:
            while (response := await answers.get()) is not None:
                yield response
                places.release()
            await reading
        finally:
            reading.cancel()

    async def _find(self, name: str, version: str, context: Any) -> Any:
        try:
            return self._models.find(name, version)
        except RequestError as error:
            await context.abort(error.reason.grpc, str(error))

    async def _infer(self, request: Any, remaining: float | None) -> Any:
        async with self._models.request(request.model_name, request.model_version, "grpc") as (model, deadline):
            if remaining is not None:
                hasten(deadline, remaining)
            with model.place():
                tensors = await model.infer(read_request(request), deadline)
            answer = pb.ModelInferResponse(model_name=model.name, model_version=model.version, id=request.id)
            for tensor in tensors:
                answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
                answer.raw_output_contents.append(tensor.array.tobytes())
            return answer


def read_request(request: Any) -> Request:
    """A request of the protocol as the server handles it.

    Raises:
        RequestError: it breaks the protocol.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise RequestError(
            Reason.BAD_REQUEST, f"expected raw contents for all {len(request.inputs)} inputs or none, found {len(raw)}"
        )
    for output in request.outputs:
        check_memory(output.name, output.parameters)
    outputs = [output.name for output in request.outputs]
    parameters = {name: _value(value) for name, value in request.parameters.items()}
    inputs = [_tensor(given, raw[number] if raw else None) for number, given in enumerate(request.inputs)]
    return Request(inputs=inputs, outputs=outputs or None, parameters=parameters)


def _tensor(given: Any, raw: bytes | None) -> Tensor:
    check_memory(given.name, given.parameters)
    if raw is not None:
        if given.HasField("contents"):
            raise RequestError(Reason.BAD_REQUEST, f"{given.name}: expected raw contents or typed ones, found both")
        return from_bytes(given.name, given.datatype, given.shape, raw)
    field = _CONTENTS.get(given.datatype)
    if field is None:
        raise RequestError(
            Reason.BAD_REQUEST, f"{given.name}: expected raw contents for the datatype {given.datatype!r}"
        )
    numbers = list(getattr(given.contents, field))
    return from_numbers(given.name, given.datatype, given.shape, lambda kind: numbers)


def _value(parameter: Any) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)


class ParsesRequests(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Parses the bytes of requests itself: grpc would call those that are no message an unknown error of the server's own."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """The handler of a method, which takes bytes in the place of messages."""
        handler = await continuation(details)
        if handler is None:
            return None
        if handler.unary_unary is not None:

            async def unary(content: bytes, context: Any) -> Any:
                request = await _parsed(handler, content, context)
                try:
                    return await handler.unary_unary(request, context)
                except NotImplementedError:  # by the generated service, for the methods that RpcServer does not have
                    await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"this server has no {details.method}")

            return grpc.unary_unary_rpc_method_handler(unary, None, handler.response_serializer)

        async def stream(contents: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
            async def requests() -> AsyncIterator[Any]:
                async for content in contents:
                    yield await _parsed(handler, content, context)

            async for response in handler.stream_stream(requests(), context):
                yield response

        return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)


async def _parsed(handler: Any, content: bytes, context: Any) -> Any:
    """The message of a request; the call is aborted where there is none."""
    try:
        return handler.request_deserializer(content)
    except DecodeError as error:
        await context.abort(Reason.BAD_REQUEST.grpc, f"the request is no message of the protocol: {error}")


async def _until(stopping: asyncio.Event, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The requests of a stream, as long as the server takes any."""
    stop, iterator = asyncio.ensure_future(stopping.wait()), aiter(requests)
    try:
        while True:
            coming = asyncio.ensure_future(anext(iterator, None))
            await asyncio.wait({coming, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                return
            if (request := coming.result()) is None:
                return
            yield request
    finally:
        stop.cancel()
