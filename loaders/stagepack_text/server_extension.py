"""Texts and embeddings as an extension of the server."""

import functools
from collections.abc import Sequence
from typing import Any, Final

from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.extensions import GrpcAnswer
from stagepack_serving.server.grpc_messages import ParsedInference
from stagepack_serving.server.limits import MAX_TEXT_BYTES
from stagepack_serving.server.model_registry import ModelRegistry
from stagepack_serving.server.openapi import Endpoint
from stagepack_serving.server.served_model import ServedModel
from stagepack_text.openai.embedder import add_embedders
from stagepack_text.openai.routes import openai_endpoints
from stagepack_text.server.generate_route import generate_endpoints
from stagepack_text.server.generators import add_generators
from stagepack_text.server.grpc_generation import asks_for_generation, generate_responses


class TextExtension:
    """See `ServerExtension`."""

    def add_parts(self, models: Sequence[ServedModel]) -> None:
        """Make the decoders of a bundle generate, and its models that can embed texts."""
        add_generators(models)
        add_embedders(models)

    def endpoints(self, models: ModelRegistry) -> list[Endpoint]:
        """Return the paths of Triton's generate extension, and those of OpenAI's API."""
        return [*generate_endpoints(models), *openai_endpoints(models)]

    def check_size(self, model: ServedModel, request: ParsedInference) -> None:
        """Refuse a large request for a text."""
        if request.byte_count > MAX_TEXT_BYTES and asks_for_generation(model, request):
            expected = f"expected a request for a text of at most {MAX_TEXT_BYTES} bytes"
            raise RequestError(RequestStatus.TOO_LARGE, f"{expected}, found {request.byte_count}")

    def grpc_answer(self, model: ServedModel, request: ParsedInference) -> GrpcAnswer | None:
        """Return what generates the text that a request asks for."""
        return functools.partial(generate_responses, model, request) if asks_for_generation(model, request) else None


SERVER: Final[Any] = TextExtension()
