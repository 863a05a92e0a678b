"""Answers over HTTP as one JSON object, or as server-sent events.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html.
"""

from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send


class AnswerChannel:
    """Sends one answer.

    Attributes:
        is_started: whether a part of the answer was sent.
        has_events: whether that part is an event.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.is_started = False
        self.has_events = False

    async def send_json(self, answer: Any, status_code: int = 200) -> None:
        """Send the whole answer as JSON.

        answer: plain data, or the JSON as bytes.
        """
        self.is_started = True
        response = (
            Response(answer, status_code, media_type="application/json")
            if isinstance(answer, bytes)
            else JSONResponse(answer, status_code)
        )
        await response(self._scope, self._receive, self._send)

    async def send_event(self, event: Any) -> None:
        """Send an event; the first one after the head of the answer."""
        if not self.is_started:
            self.is_started = self.has_events = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        data = event.encode() if isinstance(event, str) else msgspec.json.encode(event)
        await self._send(_body(b"data: " + data + b"\n\n", more=True))

    async def end_events(self) -> None:
        """End an answer of events."""
        await self._send(_body(b"", more=False))


def _body(content: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}
