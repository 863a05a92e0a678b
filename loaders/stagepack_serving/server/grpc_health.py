"""The health service of gRPC, which orchestrators and clients ask before they send requests.

Source: https://github.com/grpc/grpc/blob/master/doc/health-checking.md.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

from stagepack_serving.server.grpc_authentication import abort_unauthenticated, authorization_values
from stagepack_serving.server.served_models import ServedModels
from stagepack_serving.server.tokens import AuthenticationError, TokenCheck, check_authorization

# The service that answers inferences; an empty name is the whole server.
INFERENCE_SERVICE: Final = "inference.GRPCInferenceService"
_SERVER_SERVICES: Final = ("", INFERENCE_SERVICE)
_WATCH_SECONDS: Final = 0.2


class HealthService(HealthServicer):  # type: ignore[misc]  # generated, without types
    """Says whether the server takes requests, as ``/v2/health/ready`` does, and whether a model does, by its name as the service."""

    def __init__(self, models: ServedModels, check_token: TokenCheck | None = None) -> None:
        self._models = models
        self._check_token = check_token

    # The protocol defines the names and the effects of the methods.

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        if request.service not in _SERVER_SERVICES:
            await self._require_token(context)
        status = self._status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            message = (
                f"unknown service {request.service!r}: expected {INFERENCE_SERVICE}, a loaded model, or an empty name"
            )
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        return HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: D102, N802
        sent_status = None
        while not self._models.stopping.is_set():
            status = self._status(request.service)
            if status != sent_status:
                # The token may have been withdrawn since the call began.
                await self._require_token(context)
                sent_status = status
                yield HealthCheckResponse(status=status)
            await asyncio.sleep(_WATCH_SECONDS)

    async def _require_token(self, context: Any) -> None:
        """Abort a call without an accepted token, if calls need one."""
        if self._check_token is not None:
            try:
                check_authorization(self._check_token, authorization_values(context.invocation_metadata()))
            except AuthenticationError as error:
                await abort_unauthenticated(context, error)

    def _status(self, service: str) -> int:
        if service in _SERVER_SERVICES:
            is_ready = self._models.is_ready
        elif service in {model.name for model in self._models.serving}:
            is_ready = self._models.is_model_ready(service)
        else:
            return int(HealthCheckResponse.SERVICE_UNKNOWN)
        return int(HealthCheckResponse.SERVING if is_ready else HealthCheckResponse.NOT_SERVING)
