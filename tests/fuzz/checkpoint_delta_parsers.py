"""What a stranger writes into a delta of a checkpoint: its index, and the frame of a tensor."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch
import zstandard

from stagepack.errors import FormatError
from stagepack.format.rules import INDEX_NAME
from stagepack.roads.checkpoint_delta import _CHANGES, open_checkpoint_delta
from tests.deltas.published_deltas import ENCODINGS, publish
from tests.fuzz.parsers import FuzzedParser

_OLD, _NEW = numpy.zeros(24, numpy.uint8), numpy.arange(24, dtype=numpy.uint8) // 5


def published_parser() -> FuzzedParser:
    """Indices beside the two files of a version."""
    holder = tempfile.TemporaryDirectory()
    states = [{name: torch.from_numpy(content) for name in ("a.weight", "b.weight")} for content in (_OLD, _NEW)]
    folder = publish(Path(holder.name) / "version", *states, version="000001", base_version="000000")
    seed = (folder / INDEX_NAME).read_bytes()

    def read(content: bytes) -> None:
        (folder / INDEX_NAME).write_bytes(content)
        open_checkpoint_delta(folder)

    def encode(index: Any) -> bytes:
        return json.dumps(index).encode()

    return FuzzedParser(read=read, seeds=[seed], decode=json.loads, encode=encode, close=holder.cleanup)


def frame_parser() -> FuzzedParser:
    """Frames of a tensor of 24 bytes: a JSON list of the encoding and of the content of the frame in hexadecimal."""

    def read(content: bytes) -> None:
        try:
            encoding, text = json.loads(content)
            change, frame = _CHANGES[encoding], numpy.frombuffer(bytes.fromhex(text), numpy.uint8)
        except (TypeError, ValueError, LookupError, RecursionError) as error:
            raise FormatError([]) from error  # of the list, not of the frame
        try:
            change(_OLD.copy(), frame)
        except (ValueError, zstandard.ZstdError) as error:
            raise FormatError([]) from error

    def encode(fields: Any) -> bytes:
        """The index keeps the encoding: only the content of the frame changes."""
        encoding, content = fields
        if encoding not in ENCODINGS:
            raise ValueError("the index would be refused")
        frame = zstandard.ZstdCompressor().compress(bytes(value % 256 for value in content))
        return json.dumps([encoding, frame.hex()]).encode()

    def decode(content: bytes) -> list[Any]:
        encoding, frame = json.loads(content)
        return [encoding, [*zstandard.ZstdDecompressor().decompress(bytes.fromhex(frame), max_output_size=256)]]

    seeds = [encode([encoding, [*change(_OLD, _NEW)]]) for encoding, change in ENCODINGS.items()]
    return FuzzedParser(read=read, seeds=seeds, decode=decode, encode=encode)
