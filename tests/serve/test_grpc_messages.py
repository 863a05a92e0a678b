"""Answers over gRPC are the bytes that protobuf reads as the message of the protocol."""

import ml_dtypes
import numpy
import pytest
from tritonclient.grpc import service_pb2 as pb

from stagepack_serving.server.errors import RequestError
from stagepack_serving.server.grpc_messages import (
    decode_request,
    encode_response,
    encode_stream_response,
    parse_inference,
)
from stagepack_serving.server.parameters import InferenceTensor

ARRAYS = {
    "FP32": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
    "BOOL": numpy.array([True, False]),
    "BF16": numpy.array([1.5, -2.0], ml_dtypes.bfloat16),
    "INT64": numpy.array(-7),
    "FP64": numpy.empty((0, 3)),
    "UINT8": numpy.arange(300, dtype=numpy.uint8)[::2],
    "INT16": numpy.zeros((130, 130), numpy.int16),
    "FP16": numpy.ones((1100, 1000), numpy.float16),
}


@pytest.mark.parametrize("names", [[], *([name] for name in ARRAYS), list(ARRAYS)], ids=lambda names: "-".join(names))
def test_protobuf_reads_what_was_encoded(names: list[str]) -> None:
    outputs = [InferenceTensor(name=f"output.{name}", datatype=name, array=ARRAYS[name]) for name in names]
    content = encode_response("m", "1", "an id", outputs)
    expected = pb.ModelInferResponse(model_name="m", model_version="1", id="an id")
    for output in outputs:
        expected.outputs.add(name=output.name, datatype=output.datatype, shape=output.array.shape)
        expected.raw_output_contents.append(output.array.tobytes())
    assert pb.ModelInferResponse.FromString(content) == expected
    in_stream = pb.ModelStreamInferResponse.FromString(encode_stream_response(content))
    assert in_stream == pb.ModelStreamInferResponse(infer_response=expected)


@pytest.mark.parametrize("message", ["duplicate output: y, y", "y: this server does not support classification"])
def test_outputs_that_cannot_be_sent_are_refused(message: str) -> None:
    request = pb.ModelInferRequest(model_name="m")
    for _ in range(2 if message.startswith("duplicate") else 1):
        request.outputs.add(name="y").parameters["classification"].int64_param = 3
    with pytest.raises(RequestError, match=message):
        decode_request(parse_inference(request.SerializeToString()))
