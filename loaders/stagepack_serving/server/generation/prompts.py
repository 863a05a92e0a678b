"""Prompts and parameters of Triton's generate extension, over HTTP and gRPC."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, Raw

from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.generation.generator import GenerationRequest, Generator
from stagepack_serving.server.generation.openai_requests import SamplingFields, convert_fields
from stagepack_serving.server.parameters import InferenceTensor

# The name of a prompt that is a text; others are named as the input of the model that they are.
TEXT_INPUT: Final = "text_input"


class GenerateParameters(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a request.

    Attributes:
        max_new_tokens: another name for `max_tokens`.
        stream: what clients of Triton send; ignored, since the path and the protocol say whether the answer is a stream.
        timeout: how long the client waits, in microseconds.
        triton_enable_empty_final_response: what clients of Triton send over gRPC to be told of the end by a response of its own.
    """

    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stream: bool = False
    timeout: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    triton_enable_empty_final_response: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the settings of a generation; see `SamplingFields.settings`."""
        renamed = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        return super().settings() | renamed


async def read_request(
    generator: Generator, prompts: Mapping[str, str | Raw | InferenceTensor], parameters: Mapping[str, Any]
) -> tuple[GenerationRequest, GenerateParameters]:
    """Read a request."""
    fields: GenerateParameters = convert_fields(parameters, GenerateParameters)
    expected_names = [*([TEXT_INPUT] if generator.reads_text else ()), generator.prompt_name]
    if len(prompts) != 1 or not prompts.keys() <= set(expected_names):
        message = f"expected one prompt, {' or '.join(expected_names)}, found {', '.join(prompts) or 'none'}"
        raise RequestError(RequestStatus.BAD_REQUEST, message)
    [prompt] = prompts.values()
    array = await generator.read_prompt(prompt)
    request = GenerationRequest(prompt=array, settings=fields.settings(), stop_strings=fields.stop_strings())
    return request, fields
