"""The parsers of the files of a bundle, as the fuzzers call them."""

import io
import json
from typing import Any

import msgpack
import onnx
import safetensors
from google.protobuf.message import DecodeError

import stagepack
from stagepack.format.graph_codec import encode_graph, read_graph
from stagepack.format.manifest_codec import parse_manifest
from stagepack.format.onnx import OnnxTensor, parse_onnx_model
from stagepack.format.rules import raise_problems
from stagepack.format.validate.files import check_onnx
from stagepack.format.weights import parse_header_bytes
from tests.bundle_editor import encode_header, encode_manifest, sort_graph, sort_manifest, weight_file
from tests.conformance.vectors import SCHEMA, cases, file_content
from tests.fuzz.parsers import FuzzedParser
from tests.protobuf_fields import message, message_fields

FROZEN = SCHEMA / "frozen"


def manifest_parser() -> FuzzedParser:
    """Manifests. A manifest without the right digest is read as far as its digest."""

    def encode(fields: Any) -> bytes:
        return encode_manifest(sort_manifest(fields))

    return FuzzedParser(
        read=lambda content: parse_manifest(content, "manifest.json"),
        seeds=_seeds("manifest", "manifest.json"),
        decode=json.loads,
        encode=encode,
    )


def graph_parser() -> FuzzedParser:
    """Graph files. A graph that is read encodes to the same bytes."""

    def read(content: bytes) -> None:
        assert encode_graph(read_graph(content, "stage-0.msgpack").folded) == content
        read_graph(content, "stage-0.msgpack", newer=True, module_calls=False)

    def encode(fields: Any) -> bytes:
        packed: bytes = msgpack.packb(sort_graph(fields))
        return packed

    return FuzzedParser(read=read, seeds=_seeds("graph", "*.msgpack"), decode=msgpack.unpackb, encode=encode)


def weights_parser() -> FuzzedParser:
    """Headers of weight files. The safetensors library finds the same tensors in the same bytes."""

    def read(content: bytes) -> None:
        tensors = parse_header_bytes(io.BytesIO(content).read, len(content), "stage-0.safetensors")
        same = dict(safetensors.deserialize(content))
        for name, tensor in tensors.items():
            assert same[name]["dtype"] == tensor.dtype
            assert tuple(same[name]["shape"]) == tensor.shape
            assert bytes(same[name]["data"]) == content[tensor.start : tensor.end]

    def decode(content: bytes) -> Any:
        data_start = 8 + int.from_bytes(content[:8], "little")
        return [json.loads(content[8:data_start]), content[data_start:].decode("latin-1")]

    def encode(fields: Any) -> bytes:
        header, data = fields
        return weight_file(encode_header(header), data.encode("latin-1"))

    return FuzzedParser(read=read, seeds=_seeds("weights", "*.safetensors"), decode=decode, encode=encode)


def onnx_parser() -> FuzzedParser:
    """ONNX files. The onnx library reads what ours reads, and finds the same references to other files."""
    bundle = stagepack.open(FROZEN / "1.0" / "tower.stagepack")
    stage = bundle.stage(0)
    headers = dict(bundle.read_headers(stage.weights))
    edges = {edge.name: edge for edge in bundle.edges}

    def read(content: bytes) -> None:
        model = parse_onnx_model(content, "stage-0.onnx")
        try:
            same = onnx.ModelProto.FromString(content)
        except DecodeError:  # nested deeper than 100 messages
            return
        assert sorted(map(str, model.tensors)) == sorted(map(str, _external_tensors(same)))
        raise_problems(check_onnx(model, stage, edges, headers, "stage-0.onnx"))

    return FuzzedParser(read=read, seeds=_seeds("onnx", "*.onnx"), decode=message_fields, encode=message)


def _external_tensors(message: Any) -> list[OnnxTensor]:
    """The tensors in other files that the onnx library finds in a message."""
    tensors = []
    if isinstance(message, onnx.TensorProto) and message.data_location == onnx.TensorProto.EXTERNAL:
        entries = {entry.key: entry.value for entry in message.external_data}
        tensors.append(
            OnnxTensor(
                name=message.name,
                element_type=message.data_type,
                shape=tuple(size % 2**64 for size in message.dims),
                location=entries["location"],
                offset=int(entries["offset"]),
                length=int(entries["length"]),
            )
        )
    for descriptor, content in message.ListFields():
        if descriptor.message_type is not None:
            for nested in content if descriptor.is_repeated else [content]:
                tensors += _external_tensors(nested)
    return tensors


def _seeds(kind: str, pattern: str) -> list[bytes]:
    """The contents of the files in the vectors and in the frozen bundles."""
    return [
        *(file_content(case) for case in cases() if case.kind == kind),
        *(path.read_bytes() for path in sorted(FROZEN.glob(f"*/*/{pattern}"))),
    ]
