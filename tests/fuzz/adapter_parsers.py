"""What a stranger writes into an adapter: its document, and the header of its tensors, which belong together."""

import io
import json
from typing import Any

from stagepack.adapter.document import ADAPTER, TENSORS_NAME
from stagepack.adapter.opened import check_tensors
from stagepack.format.manifest_codec import parse_document
from stagepack.format.weights import parse_header_bytes
from tests.bundle_editor import encode_header, encode_manifest, weight_file
from tests.conformance.vectors import adapter_content, cases
from tests.fuzz.parsers import FuzzedParser


def adapter_parser() -> FuzzedParser:
    """Adapters: the size of the document in four bytes, the document, and the file of tensors."""

    def read(content: bytes) -> None:
        size = int.from_bytes(content[:4], "little")
        document = parse_document(content[4 : 4 + size], "manifest.json", ADAPTER)
        file = content[4 + size :]
        tensors = parse_header_bytes(io.BytesIO(file).read, len(file), TENSORS_NAME)
        check_tensors(document, tensors)
        assert len(document.changes) + len(document.replaced) <= len(tensors)
        for change in document.changes:
            (rank, _), (_, same_rank) = (tensors[f"{change.module}.lora_{letter}"].shape for letter in "AB")
            assert rank == same_rank > 0

    def decode(content: bytes) -> Any:
        size = int.from_bytes(content[:4], "little")
        file = content[4 + size :]
        data_start = 8 + int.from_bytes(file[:8], "little")
        header = json.loads(file[8:data_start])
        return [json.loads(content[4 : 4 + size]), header, len(file) - data_start]

    def encode(fields: Any) -> bytes:
        document, header, byte_count = fields
        if not 0 <= byte_count <= 2**16:
            raise ValueError("more zeros than a seed has")
        return joined(encode_manifest(document), weight_file(encode_header(header), bytes(byte_count)))

    seeds = [joined(*adapter_content(case.document())) for case in cases() if case.kind == "adapter"]
    return FuzzedParser(read=read, seeds=seeds, decode=decode, encode=encode)


def joined(document: bytes, file: bytes) -> bytes:
    return len(document).to_bytes(4, "little") + document + file
