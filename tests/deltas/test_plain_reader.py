"""A delta is applied with json, numpy, zstandard and blake3 alone, as SPEC.md says: no code of stagepack."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import zstandard
from blake3 import blake3

from tests.conformance.vectors import TINY, TINY_DELTA
from tests.deltas.conftest import Versions


def planes(frames: list[bytes], width: int) -> Any:
    contents = [numpy.frombuffer(zstandard.ZstdDecompressor().decompress(frame), numpy.uint8) for frame in frames]
    return numpy.stack(contents, 1).copy().view(f"<u{width}").reshape(-1)


def gap_positions(content: bytes) -> list[int]:
    positions, position = [], 0
    for byte in content:
        position += byte
        if byte < 255:
            positions.append(position)
            position += 1
    return positions


def apply_part(content: bytearray, part: list[Any], frames: list[bytes]) -> None:
    start, size, code, width, count, _ = part
    elements = numpy.frombuffer(memoryview(content)[start : start + size], f"<u{width}")
    if code == "sparse":
        positions = gap_positions(zstandard.ZstdDecompressor().decompress(frames[0]))
        assert len(positions) == count
        elements[positions] ^= planes(frames[1:], width)
    elif code == "dense":
        elements ^= planes(frames, width)
    else:
        elements[:] = planes(frames, width)


def applied(base: Path, delta: Path) -> dict[str, bytes]:
    """The files of the result, with its manifest, by name."""
    document = json.loads((delta / "manifest.json").read_text())
    assert document["base"] == json.loads((base / "manifest.json").read_text())["sha256"]
    result = (delta / "result.json").read_bytes()
    digest = json.loads(result)["sha256"]
    assert digest == document["result"] == hashlib.sha256(result.replace(digest.encode(), b"0" * 64)).hexdigest()
    changed = {entry["name"]: entry for entry in document.get("changed", [])}
    files = {"manifest.json": result}
    for entry in json.loads(result)["files"]:
        name = entry["name"]
        content = bytearray((base / name).read_bytes() if (base / name).is_file() else b"")
        content = content[: entry["size"]] + bytes(max(0, entry["size"] - len(content)))
        position = 0
        data = (delta / changed[name]["data"]).read_bytes() if name in changed else b""
        for part in changed.get(name, {}).get("parts", []):
            frames = []
            for size in part[5]:
                frames.append(data[position : position + size])
                position += size
            apply_part(content, part, frames)
        assert position == len(data)
        assert blake3(bytes(content)).hexdigest() == entry["blake3"]
        files[name] = bytes(content)
    return files


def test_the_tiny_delta_is_read(tmp_path: Path) -> None:
    weights = applied(TINY, TINY_DELTA)["stage-0.safetensors"]
    assert numpy.frombuffer(weights[256:280], "<f4").tolist() == [1, 2, 3.5, 4, 5, 6]


@pytest.mark.parametrize(("base", "delta", "result"), [("a", "b", "b"), ("b", "c", "c")])
def test_the_deltas_of_a_model_are_read(versions: Versions, base: str, delta: str, result: str) -> None:
    files = applied(versions.folder / f"{base}.stagepack", versions.folder / f"{delta}.delta")
    assert files == {path.name: path.read_bytes() for path in (versions.folder / f"{result}.stagepack").iterdir()}
