"""What extensions add to the server: parts of models, paths over REST, and answers over gRPC."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from stagepack.extensions import stated_objects
from stagepack_serving.server.grpc_messages import ParsedInference
from stagepack_serving.server.model_registry import ModelRegistry
from stagepack_serving.server.openapi import Endpoint
from stagepack_serving.server.served_model import ServedModel

# Sends a response over gRPC.
Send = Callable[[bytes], Awaitable[None]]
# Answers a request over gRPC before its deadline, with one response, or with several if it may.
GrpcAnswer = Callable[[asyncio.Timeout, Send, bool], Awaitable[None]]


class ServerExtension(Protocol):
    """What one extension adds."""

    def add_parts(self, models: Sequence[ServedModel]) -> None:
        """Add parts to the models of a bundle, one for each entry point.

        Raises:
            StagepackError: an asset of the bundle cannot be used.
        """

    def endpoints(self, models: ModelRegistry) -> list[Endpoint]:
        """Return the paths over REST."""

    def check_size(self, model: ServedModel, request: ParsedInference) -> None:
        """Refuse a request over gRPC that is larger than the extension reads, before it is decoded.

        Raises:
            RequestError: it is.
        """

    def grpc_answer(self, model: ServedModel, request: ParsedInference) -> GrpcAnswer | None:
        """Return what answers a request over gRPC in the place of the model; None if that is the model itself."""


@functools.cache
def server_extensions() -> Sequence[ServerExtension]:
    """Return what the installed extensions add."""
    return stated_objects("server")
