"""Bodies of inference answers over HTTP: JSON, then the binary tensors.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy

from stagepack_serving.protocol.interface import Interface
from stagepack_serving.server.errors import RequestError, RequestStatus
from stagepack_serving.server.json_numbers import json_from_array
from stagepack_serving.server.messages import InferenceTensor
from stagepack_serving.server.parameters import boolean_parameter, check_requested_outputs
from stagepack_serving.server.rest_request import RequestHeader


def check_output_parameters(header: RequestHeader, interface: Interface) -> None:
    """Check, before the model runs, that the outputs can be sent in the form that the request asks for."""
    parameters = _output_parameters(header)
    check_requested_outputs([(output.name, output.parameters) for output in header.outputs or ()])
    for output_name, tensor in interface.outputs.items():
        is_binary = _is_binary(header, output_name)
        is_requested = not parameters or output_name in parameters
        if tensor.datatype == "BF16" and is_requested and not is_binary:
            message = f"{output_name}: BF16 is sent as binary data: set the parameter binary_data"
            raise RequestError(RequestStatus.BAD_REQUEST, message)


def encode_response(
    model_name: str, version: str, header: RequestHeader, outputs: Sequence[InferenceTensor]
) -> tuple[bytes, list[memoryview]]:
    """Encode an answer in the form that the request asks for, in steps of a few milliseconds, between which other threads run."""
    head: dict[str, Any] = {"model_name": model_name, "model_version": version}
    if header.id:
        head["id"] = header.id
    parts = [msgspec.json.encode(head)[:-1], b',"outputs":[']
    binary_parts = []
    for position, tensor in enumerate(outputs):
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.array.shape)}
        if position:
            parts.append(b",")
        if _is_binary(header, tensor.name):
            array = numpy.ascontiguousarray(tensor.array)
            entry["parameters"] = {"binary_data_size": array.nbytes}
            binary_parts.append(array.reshape(-1).view(numpy.uint8).data)
            parts.append(msgspec.json.encode(entry))
        else:
            parts += [msgspec.json.encode(entry)[:-1], b',"data":', *json_from_array(tensor.array), b"}"]
    return b"".join([*parts, b"]}"]), binary_parts


def json_bytes(header: RequestHeader, outputs: Sequence[InferenceTensor]) -> int:
    """Return how many bytes of elements `encode_response` will write as JSON."""
    return sum(tensor.array.nbytes for tensor in outputs if not _is_binary(header, tensor.name))


def _output_parameters(header: RequestHeader) -> dict[str, dict[str, Any]]:
    """The parameters of each requested output by name; empty if the request names no outputs."""
    return {output.name: output.parameters for output in header.outputs or ()}


def _is_binary(header: RequestHeader, output_name: str) -> bool:
    default = boolean_parameter(header.parameters, "binary_data_output")
    return boolean_parameter(_output_parameters(header).get(output_name, {}), "binary_data", default)
