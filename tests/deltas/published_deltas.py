"""Folders as Slime and ModelExpress publish them, written and applied by numpy after their description alone."""

import importlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import blake3
import numpy
import torch
import zstandard
from safetensors import safe_open
from safetensors.numpy import save_file

State = Mapping[str, torch.Tensor]
Octets = numpy.ndarray[Any, Any]


def checksum(kind: str, content: Octets) -> str:
    if kind == "adler32":
        return f"{zlib.adler32(content.tobytes()):08x}"
    if kind == "blake3":
        return blake3.blake3(content.tobytes()).hexdigest()
    digest: str = importlib.import_module("xxhash").xxh3_128_hexdigest(content.tobytes())
    return digest


def octets(tensor: torch.Tensor) -> Octets:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def xor(old: Octets, new: Octets) -> bytes:
    return (old ^ new).tobytes()


def overwrite(old: Octets, new: Octets) -> bytes:
    positions = numpy.flatnonzero(old != new)
    return (
        len(positions).to_bytes(4, "little")
        + b"".join(int(position).to_bytes(4, "little") for position in positions)
        + new[positions].tobytes()
    )


ENCODINGS: Mapping[str, Callable[[Octets, Octets], bytes]] = {"xor": xor, "overwrite": overwrite}


def publish(
    folder: Path,
    old: State,
    new: State,
    *,
    version: object,
    base_version: object,
    encoding: str = "xor",
    kind: str = "adler32",
) -> Path:
    """Write what differs between two checkpoints, in two files, as two ranks of a trainer do."""
    folder.mkdir()
    changed = [name for name in new if (octets(old[name]) != octets(new[name])).any()]
    weight_map: dict[str, str] = {}
    ranks: Sequence[list[str]] = [changed[::2], changed[1::2]]
    for rank, names in enumerate(ranks):
        file_name = f"model-{rank:05d}-of-00002.safetensors"
        frames, checksums = {}, {}
        for name in names:
            before, after = octets(old[name]), octets(new[name])
            frame = zstandard.ZstdCompressor(level=1).compress(ENCODINGS[encoding](before, after))
            frames[name], checksums[name] = numpy.frombuffer(frame, numpy.uint8), checksum(kind, after)
        if names:
            save_file(frames, folder / file_name, checksums)
            weight_map |= dict.fromkeys(names, file_name)
    facts = {"version": version, "base_version": base_version, "delta_encoding": encoding}
    facts |= {"compression_format": "zstd", "checksum_format": kind}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": facts, "weight_map": weight_map}))
    return folder


def pull(folder: Path, state: State) -> dict[str, torch.Tensor]:
    """Apply a published version to a checkpoint, as an engine does that receives it."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["delta_encoding"] == "xor"
    assert index["metadata"]["compression_format"] == "zstd"
    assert index["metadata"]["checksum_format"] == "adler32"
    pulled = {name: tensor.clone() for name, tensor in state.items()}
    for name, file_name in index["weight_map"].items():
        with safe_open(folder / file_name, framework="numpy") as file:
            frame, expected = file.get_tensor(name), file.metadata()[name]
        assert frame.dtype == numpy.uint8
        elements = octets(pulled[name])
        elements ^= numpy.frombuffer(zstandard.ZstdDecompressor().decompress(frame.tobytes()), numpy.uint8)
        assert checksum("adler32", elements) == expected
    return pulled
