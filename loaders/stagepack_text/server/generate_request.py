"""A request of Triton's generate extension, over HTTP or gRPC."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, Raw

from stagepack_serving.server.errors import BadRequestError
from stagepack_serving.server.parameters import InferenceTensor
from stagepack_text.server.generator import Generator
from stagepack_text.server.sampling_fields import SamplingFields, TokenCount, convert_fields
from stagepack_text.server.served_text import GenerationRequest

# The name of a prompt that is a text; others are named as the input of the model that they are.
TEXT_INPUT: Final = "text_input"


class GenerateParameters(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a request of the generate extension.

    Clients of Triton send `stream`, which is ignored, since the path and the protocol say whether the answer is a stream; and over gRPC
    `triton_enable_empty_final_response`, to be told of the end by a response of its own.
    """

    max_new_tokens: TokenCount | None = None  # another name for `max_tokens`
    adapter: str | None = None
    stream: bool = False
    timeout: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0  # in microseconds
    triton_enable_empty_final_response: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the settings of a generation."""
        renamed = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        return super().settings() | renamed


async def read_request(
    generator: Generator, prompts: Mapping[str, str | Raw | InferenceTensor], parameters: Mapping[str, Any]
) -> tuple[GenerationRequest, GenerateParameters]:
    """Read a request of the generate extension, whose one prompt is a text or an input of the model."""
    fields: GenerateParameters = convert_fields(parameters, GenerateParameters)
    expected_names = [*([TEXT_INPUT] if generator.reads_text else ()), generator.prompt_name]
    if len(prompts) != 1 or not prompts.keys() <= set(expected_names):
        message = f"expected one prompt, {' or '.join(expected_names)}, found {', '.join(prompts) or 'none'}"
        raise BadRequestError(message)
    [prompt] = prompts.values()
    array = await generator.read_prompt(prompt)
    generator.check_adapter(fields.adapter)
    request = GenerationRequest(
        prompt=array, settings=fields.settings(), stop_strings=fields.stop_strings(), adapter=fields.adapter
    )
    return request, fields
