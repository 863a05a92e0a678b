"""Tokens of requests over HTTP."""

from typing import Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from stagepack_serving.server.errors import is_openai_path, refusal_fields
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.tokens import AuthenticationError, TokenCheck, check_authorization

# Kubernetes and load balancers ask them, and send no token.
PATHS_WITHOUT_TOKEN: Final = frozenset({"/v2/health/live", "/v2/health/ready"})


class TokenGuard:
    """An ASGI application that wraps another one, and answers requests without an accepted token with 401, before their bodies are read.

    The health of the server needs no token.
    """

    def __init__(self, application: ASGIApp, check_token: TokenCheck, metrics: Metrics) -> None:
        self._application = application
        self._check_token = check_token
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        values = [value.decode("latin-1") for header_name, value in scope["headers"] if header_name == b"authorization"]
        try:
            if scope["path"] not in PATHS_WITHOUT_TOKEN:
                check_authorization(self._check_token, values)
        except AuthenticationError as error:
            protocol = "openai" if is_openai_path(scope["path"]) else "rest"
            self._metrics.count_answer("", "", protocol, error.status.name)
            fields = refusal_fields(scope["path"], str(error), error.status.http_code)
            refusal = JSONResponse(fields, error.status.http_code, {"www-authenticate": error.challenge})
            await refusal(scope, receive, send)
        else:
            await self._application(scope, receive, send)
