"""Answers with texts over HTTP: one JSON object, or server-sent events.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from stagepack_serving.server.errors import RequestError, refusal_fields
from stagepack_serving.server.model_registry import ModelRegistry, RequestScope
from stagepack_serving.server.rest_request import unless_disconnected
from stagepack_serving.server.served_model import ServedModel

# Characters of texts that the standard does not end a line at, but clients do that split lines as Python does.
_LINE_ENDS: Final = {end.encode(): json.dumps(end)[1:-1].encode() for end in ("\x85", "\u2028", "\u2029")}


class EventChannel(Protocol):
    """Sends an answer in events."""

    async def send_event(self, event: Any) -> None:
        """Send an event."""

    async def end_events(self) -> None:
        """End the answer."""


class AnswerChannel:
    """Sends one answer.

    Attributes:
        is_started: whether a part of the answer was sent.
        event_count: how many events were sent.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.is_started = False
        self.event_count = 0

    async def send_json(self, answer: Any) -> None:
        """Send the whole answer: plain data, or JSON as bytes."""
        self.is_started = True
        is_json = isinstance(answer, bytes)
        response = Response(answer, media_type="application/json") if is_json else JSONResponse(answer)
        await response(self._scope, self._receive, self._send)

    async def send_event(self, event: Any) -> None:
        """Send an event; the first one after the head of the answer. One with a type is named so."""
        if not self.is_started:
            self.is_started = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        data = event.encode() if isinstance(event, str) else msgspec.json.encode(event)
        for character, escape in _LINE_ENDS.items():
            data = data.replace(character, escape)
        type_line = f"event: {event['type']}\n".encode() if isinstance(event, dict) and "type" in event else b""
        self.event_count += 1
        await self._send(
            {"type": "http.response.body", "body": type_line + b"data: " + data + b"\n\n", "more_body": True}
        )

    async def end_events(self) -> None:
        """End an answer of events."""
        await self._send({"type": "http.response.body", "body": b""})


class TextRoute(ABC):
    """An ASGI application that answers requests for texts; an error after the first event is an event."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    @abstractmethod
    def _begin(self, request: Request) -> AbstractAsyncContextManager[tuple[RequestScope, Any]]:
        """Read a request: its scope, which lasts as long as the context, and its fields."""

    @abstractmethod
    async def _answer(self, model: ServedModel, fields: Any, channel: AnswerChannel, deadline: asyncio.Timeout) -> Any:
        """Run the model on a request; return the answer, or None if it was sent as events."""

    def _error_event(self, path: str, error: RequestError, event_count: int) -> dict[str, Any]:
        """The event of an error after other events."""
        return refusal_fields(path, str(error), error.status.http_code, error.code, error.field_name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        channel = AnswerChannel(scope, receive, send)
        try:
            async with self._begin(Request(scope, receive)) as (request_scope, fields):
                request_scope.has_begun = lambda: channel.is_started
                request_scope.timeline.enter("generate")
                with request_scope.reserve_place({}) as model:
                    answering = self._answer(model, fields, channel, request_scope.deadline)
                    answer = await unless_disconnected(answering, receive)
                    if answer is not None:
                        await request_scope.begin_answer()
                        await channel.send_json(answer)
        except RequestError as error:
            if channel.event_count:
                await channel.send_event(self._error_event(scope["path"], error, channel.event_count))
                await channel.end_events()
            elif not channel.is_started:
                raise
