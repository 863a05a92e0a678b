"""The route for inferences over HTTP, from the head of a request to the last byte of the answer."""

import asyncio
from typing import Final

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from stagepack_serving.server.errors import RequestError
from stagepack_serving.server.model_registry import ModelRegistry
from stagepack_serving.server.parameters import named_adapter
from stagepack_serving.server.rest_large_request import beside_loop
from stagepack_serving.server.rest_request import (
    BINARY_HEADER,
    check_output_parameters,
    decode_rest_request,
    encode_rest_response,
    header_value,
    json_bytes,
    read_body,
    requested_model,
    unless_disconnected,
)

# An answer is sent in such parts, between which the event loop answers others: TLS encrypts each at once.
_SENT_BYTES: Final = 1_048_576


class InferenceRoute:
    """An ASGI application that answers inference requests.

    It is no handler that returns a response, because the request counts until its answer is sent.
    """

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request, sent_types = Request(scope, receive), []

        async def recording_send(message: Message) -> None:
            sent_types.append(message["type"])
            await send(message)

        try:
            async with self._models.request_scope(*requested_model(request), "rest") as request_scope:
                request_scope.check_admission()
                body = await read_body(request, self._models.limits.max_request_bytes)
                request_scope.timeline.enter("decode")
                request_scope.check_admission()  # others may have come meanwhile
                header, inference_request = await beside_loop(
                    len(body), decode_rest_request, body, header_value(request, BINARY_HEADER)
                )
                del body
                header.parameters.update(named_adapter(header.parameters, request_scope.adapter))
                with request_scope.reserve_place(header.parameters) as model:
                    check_output_parameters(header, model.interface)
                    inference = model.infer(inference_request, request_scope.deadline)
                    outputs = await unless_disconnected(inference, receive)
                    request_scope.timeline.enter("encode")
                    answer = await beside_loop(
                        json_bytes(header, outputs), encode_rest_response, model.name, model.version, header, outputs
                    )
                    await request_scope.begin_answer()
                    await _send_response(*answer, recording_send)
        except RequestError:
            if not sent_types:  # Else the client does not read its answer: uvicorn closes the connection.
                raise


async def _send_response(json_part: bytes, binary_parts: list[memoryview], send: Send) -> None:
    """Send the JSON of an answer, and then the binary tensors without copying them."""
    parts = [memoryview(json_part), *binary_parts]
    headers = [
        (b"content-type", b"application/octet-stream" if binary_parts else b"application/json"),
        (b"content-length", str(sum(map(len, parts))).encode()),
    ]
    if binary_parts:
        headers.append((BINARY_HEADER.encode(), str(len(json_part)).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in parts:
        for start in range(0, len(part), _SENT_BYTES):
            body = part[start : start + _SENT_BYTES]
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})
