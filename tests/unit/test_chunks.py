"""Digests by chunk: the same from a stream, a file and threads; a changed byte is found in its chunk."""

import os
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from stagepack.format.chunks import CHUNK_BYTES, check_content, chunk_count, file_chunks
from stagepack.format.file_checks import check_digests
from stagepack.format.file_writing import FileRange, Piece, write_pieces
from stagepack.format.writer import BundleWriter
from tests.bundle_editor import file_digests

CONTENT = os.urandom(2**16) * (2 * CHUNK_BYTES // 2**16) + b"end"


@settings(max_examples=8, deadline=None)
@given(size=st.integers(0, len(CONTENT)), pieces=st.lists(st.integers(1, CHUNK_BYTES + 5), min_size=1, max_size=4))
def test_a_stream_in_any_pieces_has_the_digests_of_the_file(size: int, pieces: list[int]) -> None:
    position = 0
    parts: list[Piece] = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.write_bytes(CONTENT)
        while position < size:
            # The rest is one piece: pieces of a byte alone would be 33 million.
            end = min(position + pieces[position % len(pieces)], size) if len(parts) < 200 else size
            # From memory and from another file in turn.
            from_file = FileRange(path=source, start=position, size=end - position)
            parts.append(from_file if len(parts) % 2 else memoryview(CONTENT)[position:end])
            position = end
        entry = write_pieces(Path(folder) / "x", parts)
        assert (Path(folder) / "x").read_bytes() == CONTENT[:size]
    stated = file_digests(CONTENT[:size])
    assert (entry.size, entry.blake3, list(entry.chunks)) == (size, stated["blake3"], stated.get("chunks", []))
    assert len(file_chunks(entry)) == chunk_count(size)
    assert not check_content(entry, CONTENT[:size])


def test_a_file_has_the_digests_of_its_content_and_a_change_is_found_in_its_chunk(tmp_path: Path) -> None:
    seen: list[int] = []
    entry = write_pieces(tmp_path / "x", [CONTENT], progress=seen.append)
    assert {"blake3": entry.blake3, "chunks": list(entry.chunks)} == file_digests(CONTENT)
    assert sum(seen) == len(CONTENT)
    assert not check_digests(tmp_path, [entry])
    with (tmp_path / "x").open("r+b") as file:
        file.seek(CHUNK_BYTES)
        file.write(bytes([CONTENT[CHUNK_BYTES] ^ 1]))
    [problem] = check_digests(tmp_path, [entry])
    assert f"in the bytes {CHUNK_BYTES} to {2 * CHUNK_BYTES}: expected blake3" in problem.message
    assert [chunk.index for chunk in file_chunks(entry, CHUNK_BYTES - 1, CHUNK_BYTES + 1)] == [0, 1]
    assert file_chunks(entry, 0, CHUNK_BYTES)[0].check(CONTENT[:CHUNK_BYTES]) is None
    assert file_chunks(entry, CHUNK_BYTES)[0].check(bytes(CHUNK_BYTES)) is not None


def test_the_writer_lists_the_chunks(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "m", overwrite=False) as writer:
        writer.write_file("x", [CONTENT[:5], b"", memoryview(CONTENT)[5:]])
        [entry] = writer._file_entries
        assert {"blake3": entry.blake3, "chunks": list(entry.chunks)} == file_digests(CONTENT)
