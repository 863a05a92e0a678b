"""What a stranger writes into a delta: its document, and the frames of a part."""

import json
from typing import Any

from stagepack.deltas.codes import CodeError, decode_planes, decode_sparse
from stagepack.deltas.delta import DELTA
from stagepack.errors import FormatError
from stagepack.format.manifest_codec import parse_document
from tests.bundle_editor import encode_manifest
from tests.conformance.vectors import TINY_DELTA, cases, edited
from tests.fuzz.parsers import FuzzedParser


def delta_parser() -> FuzzedParser:
    """Documents of deltas. One without the right digest is read as far as its digest."""
    base = json.loads((TINY_DELTA / "manifest.json").read_text())
    patches = [
        edit for case in cases() if case.kind == "deltas" for edit in case.fields["edit"] if edit["op"] == "patch"
    ]
    return FuzzedParser(
        read=lambda content: parse_document(content, "manifest.json", DELTA),
        seeds=[encode_manifest(base), *(encode_manifest(edited(base, patch["edit"])) for patch in patches)],
        decode=json.loads,
        encode=encode_manifest,
    )


def part_parser() -> FuzzedParser:
    """Frames of a part: a JSON list of the code, the width, the count, the number of elements, and the frames in hexadecimal."""

    def read(content: bytes) -> None:
        try:
            code, width, count, elements, texts = json.loads(encode(json.loads(content)))
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise FormatError([]) from error  # of the list, not of the frames
        frames = [memoryview(bytes.fromhex(text)) for text in texts]
        try:
            if code == "sparse":
                positions, values = decode_sparse(frames, count, elements, width)
                assert len(positions) == len(values) == count
                assert 0 <= positions[0] <= positions[-1] < elements
            else:
                assert len(decode_planes(frames, count, width)) == count
        except CodeError as error:
            raise FormatError([]) from error

    def encode(fields: Any) -> bytes:
        """The document keeps the rules on parts (Y5): only frames change."""
        code, width, count, elements, frames = fields
        is_valid = (
            code in ("sparse", "dense", "whole") and width in (1, 2, 4, 8) and len(frames) == width + (code == "sparse")
        )
        if not is_valid or type(count) is not int or not 0 < count <= elements <= 2**21:
            raise ValueError("the document would be refused")
        return json.dumps([code, width, count, elements, [bytes.fromhex(frame).hex() for frame in frames]]).encode()

    parts = [case.fields["part"] for case in cases() if case.kind == "parts"]
    fields = [[code, width, count, size // width, frames] for _, size, code, width, count, frames in parts]
    return FuzzedParser(
        read=read, seeds=[json.dumps(seed).encode() for seed in fields], decode=json.loads, encode=encode
    )
