"""Generation over gRPC: several responses to one request, as Triton's decoupled models give them.

Source: https://github.com/triton-inference-server/server/blob/main/docs/user_guide/decoupled_models.md.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from stagepack_serving.server.errors import BadRequestError
from stagepack_serving.server.grpc_messages import (
    ParsedInference,
    add_weight_parameter,
    decode_input,
    decode_parameters,
    typed_bytes,
)
from stagepack_serving.server.parameters import InferenceTensor, shorten_deadline, timeout_parameter
from stagepack_serving.server.rest_large_request import beside_loop
from stagepack_serving.server.served_model import ServedModel
from stagepack_text.server.generate_request import TEXT_INPUT, read_request
from stagepack_text.server.generators import Generators, generator_of

# A call of the decoder has this input; a prompt has not.
_CALL_INPUT: Final = "cache_position"
# Parameters of a response and of a request that Triton defines.
_FINAL_RESPONSE: Final = "triton_final_response"
_LENGTH: Final = struct.Struct("<I")


def asks_for_generation(model: ServedModel, inference: ParsedInference) -> bool:
    """Return whether a request has a prompt, and not the inputs of one call of the model."""
    return model.part(Generators) is not None and _CALL_INPUT not in {
        tensor.name for tensor in inference.message.inputs
    }


async def generate_responses(
    model: ServedModel,
    inference: ParsedInference,
    deadline: asyncio.Timeout,
    send: Callable[[bytes], Awaitable[None]],
    streams: bool,
) -> None:
    """Answer a request that has a prompt."""
    generator, message = generator_of(model), inference.message
    parameters = decode_parameters(message.parameters)
    shorten_deadline(deadline, timeout_parameter(parameters))
    prompts = await beside_loop(typed_bytes(message), _decode_prompts, inference)
    request, fields = await read_request(generator, prompts, parameters)
    has_text = generator.text_format is not None
    ends_empty = streams and fields.triton_enable_empty_final_response
    text = ""
    tokens: list[int] = []
    async with aclosing(generator.generate([request])) as parts:
        async for part in parts:
            text += part.text
            tokens.append(part.token)
            if not streams and part.finish_reason is None:
                continue
            response = _encode_part(model, message.id, text if has_text else None, tokens)
            add_weight_parameter(response)
            if part.finish_reason is not None:
                response.parameters["finish_reason"].string_param = part.finish_reason
            if streams:
                is_final = part.finish_reason is not None and not ends_empty
                response.parameters[_FINAL_RESPONSE].bool_param = is_final
            await send(response.SerializeToString())
            text, tokens = "", []
    if ends_empty:
        response = pb.ModelInferResponse(model_name=model.name, model_version=model.version, id=message.id)
        add_weight_parameter(response)
        response.parameters[_FINAL_RESPONSE].bool_param = True
        await send(response.SerializeToString())


def _encode_part(model: ServedModel, request_id: str, text: str | None, tokens: list[int]) -> Any:
    """A response with generated tokens, and with their text if there is one."""
    response = pb.ModelInferResponse(model_name=model.name, model_version=model.version, id=request_id)
    if text is not None:
        content = text.encode()
        response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
        response.raw_output_contents.append(_LENGTH.pack(len(content)) + content)
    response.outputs.add(name="output_ids", datatype="INT64", shape=[len(tokens)])
    response.raw_output_contents.append(struct.pack(f"<{len(tokens)}q", *tokens))
    return response


def _decode_prompts(inference: ParsedInference) -> dict[str, str | InferenceTensor]:
    """The inputs of a request by name."""
    prompts: dict[str, str | InferenceTensor] = {}
    for tensor, raw_content in inference.input_contents():
        if tensor.name == TEXT_INPUT:
            prompts[tensor.name] = _decode_text(tensor, raw_content)
        else:
            prompts[tensor.name] = decode_input(tensor, raw_content)
    return prompts


def _decode_text(tensor: Any, raw_content: bytes | memoryview | None) -> str:
    """The text of a tensor that is one string: in raw contents, its length precedes it."""
    strings = list(tensor.contents.bytes_contents)
    if raw_content is not None and len(raw_content) == _LENGTH.size + int.from_bytes(
        raw_content[: _LENGTH.size], "little"
    ):
        strings = [raw_content[_LENGTH.size :]]
    if tensor.datatype != "BYTES" or len(strings) != 1:
        raise BadRequestError(f"{tensor.name}: expected one string of the datatype BYTES")
    try:
        return bytes(strings[0]).decode()
    except UnicodeDecodeError as error:
        raise BadRequestError(f"{tensor.name}: expected UTF-8: {error}") from None
