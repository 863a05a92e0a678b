"""Deltas of checkpoints, as Slime and ModelExpress publish them, become deltas of a bundle, and a bundle publishes them."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
import zstandard
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import stagepack
from stagepack.cli import main
from stagepack.errors import CaptureError, MissingPackageError, OutputExistsError
from stagepack.format.reader import Bundle
from tests.deltas.conftest import Versions
from tests.deltas.published_deltas import ENCODINGS, publish, pull

INDEX = "model.safetensors.index.json"
X = torch.linspace(-1, 1, 128).reshape(2, 64).bfloat16()


def weight_files(bundle: Bundle) -> dict[str, str]:
    return {entry.name: entry.blake3 for entry in bundle.listed if entry.name.startswith(("stage-", "shared-"))}


@pytest.mark.parametrize("kind", ["adler32", "blake3", "xxh3-128"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_published_versions_become_the_next_versions(
    versions: Versions, tmp_path: Path, encoding: str, kind: str
) -> None:
    if kind == "xxh3-128":
        pytest.importorskip("xxhash")
    states = [versions.model(name).state_dict() for name in "abc"]
    base, deltas = stagepack.open(versions.a), []
    for number, bundle in enumerate((versions.b, versions.c)):
        names = {"version": f"{number + 1:06d}", "base_version": f"{number:06d}"}
        folder = tmp_path / f"weight_v{number + 1:06d}"
        publish(folder, states[number], states[number + 1], encoding=encoding, kind=kind, **names)
        deltas.append(stagepack.delta(base, folder, out=tmp_path / f"{number}.delta"))
        assert deltas[-1].version == f"{number + 1:06d}"
        base = stagepack.open(versions.a, deltas=deltas)
        expected = stagepack.open(bundle)
        assert weight_files(base) == weight_files(expected)
        base.verify()
    assert torch.equal(stagepack.load(versions.a, deltas=deltas)(X), stagepack.load(versions.c)(X))
    # The whole bundle, too.
    next_bundle = stagepack.export(tmp_path / "weight_v000001", graph_from=versions.a, out=tmp_path / "b.stagepack")
    assert next_bundle.files == stagepack.open(versions.b).files


def test_a_bundle_publishes_its_next_version(versions: Versions, tmp_path: Path) -> None:
    states = [versions.model(name).state_dict() for name in "abc"]
    composed = stagepack.open(versions.a, deltas=[versions.a_to_b])
    pairs: list[tuple[Path | Bundle, Path]] = [(versions.a, versions.b), (composed, versions.c)]
    pulled = states[0]
    for number, (old, new) in enumerate(pairs):
        folder = tmp_path / f"weight_v{number + 1:06d}"
        versions_named = {"version": f"{number + 1:06d}", "base_version": f"{number:06d}"}
        assert stagepack.write_checkpoint_delta(old, new, out=folder, **versions_named) == folder
        pulled = pull(folder, pulled)
        assert all(torch.equal(tensor, states[number + 1][name]) for name, tensor in pulled.items())
        metadata = json.loads((folder / INDEX).read_text())["metadata"]
        assert metadata.items() >= versions_named.items()
    # And back: the published files make the delta that the weights make.
    delta = stagepack.delta(versions.a, tmp_path / "weight_v000001", out=tmp_path / "there")
    expected_delta = stagepack.delta(versions.a, states[1], out=tmp_path / "expected", version="000001")
    assert delta.digest == expected_delta.digest
    with pytest.raises(OutputExistsError):
        stagepack.write_checkpoint_delta(versions.a, versions.b, out=folder, version="1", base_version="0")
    stagepack.write_checkpoint_delta(versions.a, versions.a, out=tmp_path / "same", version="1", base_version="0")
    assert json.loads((tmp_path / "same" / INDEX).read_text())["weight_map"] == {}
    other = stagepack.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), out=tmp_path / "other.stagepack")
    with pytest.raises(CaptureError, match="found others"):
        stagepack.write_checkpoint_delta(versions.a, other, out=tmp_path / "x", version="1", base_version="0")


class Tied(torch.nn.Module):
    """A tied weight, a buffer of zeros, a non-persistent buffer and one that is read through a view."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("zeros", torch.zeros(4))
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.table(ids) * self.scale + self.zeros)
        return result


def test_names_of_checkpoints_are_found_in_the_bundle(tmp_path: Path) -> None:
    """With a prefix more or less, and by any name of a tied weight."""
    model, ids = Tied(), torch.arange(6)
    bundle = stagepack.export(model, (ids,), out=tmp_path / "m.stagepack")
    old = {"table.weight": model.table.weight.detach().clone()}
    with torch.no_grad():
        model.table.weight[2] += 1
    expected = model(ids)
    for number, name in enumerate(("table.weight", "head.weight", "model.table.weight", "weight")):
        folder = tmp_path / f"weight_v{number}"
        before, after = ({name: tensor.detach()} for tensor in (old["table.weight"], model.table.weight))
        publish(folder, before, after, version=1, base_version=0)
        if name == "weight":
            with pytest.raises(CaptureError, match="expected names of the bundle"):
                stagepack.delta(bundle, folder, out=tmp_path / "several")
            continue
        delta = stagepack.delta(bundle, folder, out=tmp_path / f"{number}.delta", version="mine")
        assert delta.version == "mine"
        assert torch.equal(stagepack.load(bundle, deltas=[delta])(ids), expected)
    # In a checkpoint, a tied weight has its first name.
    composed = stagepack.open(bundle.path, deltas=[delta])
    published = stagepack.write_checkpoint_delta(bundle, composed, out=tmp_path / "v1", version="1", base_version="0")
    assert torch.equal(pull(published, old)["table.weight"], model.table.weight)
    other = Tied()
    other.load_state_dict(model.state_dict())
    other.scale += 1
    changed = stagepack.export(other, (ids,), out=tmp_path / "other.stagepack")
    with pytest.raises(CaptureError, match="scale differs, and is in no checkpoint"):
        stagepack.write_checkpoint_delta(composed, changed, out=tmp_path / "v2", version="2", base_version="1")


def change_index(folder: Path, **metadata: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["metadata"] |= metadata
    (folder / INDEX).write_text(json.dumps(index))


def change_frame(folder: Path, content: bytes, *, keeps_checksum: bool = True) -> None:
    """Give a tensor another frame."""
    index = json.loads((folder / INDEX).read_text())
    path = folder / index["weight_map"]["1.weight"]
    with safe_open(path, framework="numpy") as file:
        checksums = file.metadata()
    frames = load_file(path) | {"1.weight": numpy.frombuffer(content, numpy.uint8)}
    save_file(frames, path, checksums if keeps_checksum else {})


def compressed(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def positions_out_of_range(folder: Path) -> None:
    number = (1).to_bytes(4, "little")
    change_frame(folder, compressed(number + (2**31).to_bytes(4, "little") + b"x"))


def fewer_values(folder: Path) -> None:
    change_frame(folder, compressed((1000).to_bytes(4, "little") + bytes(10)))


def stray_file(folder: Path) -> None:
    save_file({"1.weight": numpy.zeros(3, numpy.uint8)}, folder / "model-00007-of-00002.safetensors", {"1.weight": "0"})


def other_name(folder: Path) -> None:
    path = folder / "model-00000-of-00002.safetensors"
    frames = load_file(path)
    index = json.loads((folder / INDEX).read_text())
    for name in frames:
        del index["weight_map"][name]
    frames = {f"other.{name}": frame for name, frame in frames.items()}
    index["weight_map"] |= dict.fromkeys(frames, path.name)
    save_file(frames, path, dict.fromkeys(frames, "0"))
    (folder / INDEX).write_text(json.dumps(index))


def cut_short(folder: Path) -> None:
    path = folder / "model-00000-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another base": (lambda folder: None, r"expected the adler32 .*or is not on this bundle, but on the version '0'"),
    "encoding": (lambda folder: change_index(folder, delta_encoding="sparse"), "Invalid enum value 'sparse'"),
    "compression": (lambda folder: change_index(folder, compression_format="lz4"), "Invalid enum value 'lz4'"),
    "checksum": (lambda folder: change_index(folder, checksum_format="md5"), "Invalid enum value 'md5'"),
    "no version": (lambda folder: change_index(folder, version=None), "Expected `int | str`"),
    "no checksums": (lambda folder: change_frame(folder, b"x", keeps_checksum=False), "each with a checksum"),
    "no frame": (lambda folder: change_frame(folder, b"none of zstd"), "1.weight cannot be decoded"),
    "smaller": (lambda folder: change_frame(folder, compressed(b"short")), "expected 2097152 .*found 5"),
    "a bomb": (
        lambda folder: change_frame(folder, compressed(bytes(2**28))),
        "expected at most 2097152 .*found 268435456",
    ),
    "positions": (positions_out_of_range, "expected positions below 2097152, found 2147483648"),
    "values": (fewer_values, "expected 1000 positions and values, found 10 bytes"),
    "a stray file": (stray_file, "found others: 1.weight"),
    "another name": (other_name, "expected names of the bundle"),
    "a file cut short": (cut_short, "are not in the file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_delta_on_the_bundle_is_refused(versions: Versions, tmp_path: Path, case: str) -> None:
    change, message = REFUSED[case]
    states = [versions.model(name).state_dict() for name in "abc"]
    encoding = "overwrite" if case in ("positions", "values") else "xor"
    folder = publish(tmp_path / "weight_v1", *states[:2], version="1", base_version="0", encoding=encoding)
    change(folder)
    bundle = versions.c if case == "another base" else versions.a
    with pytest.raises(CaptureError, match=message):
        stagepack.delta(bundle, folder, out=tmp_path / "m.delta")
    assert not (tmp_path / "m.delta").exists()


def test_versions_are_taken_in_their_order(versions: Versions, tmp_path: Path) -> None:
    """By the names of versions: of its base, a published delta has no digest."""
    states = [versions.model(name).state_dict() for name in "abc"]
    for number in (0, 1):
        names = {"version": f"{number + 1}", "base_version": f"{number}"}
        publish(tmp_path / f"weight_v{number + 1}", states[number], states[number + 1], **names)
    first = stagepack.delta(versions.a, tmp_path / "weight_v1", out=tmp_path / "1.delta")
    base = stagepack.open(versions.a, deltas=[first])
    with pytest.raises(
        CaptureError, match="expected a delta on '1', as the version of the bundle is named, found one on '0'"
    ):
        stagepack.delta(base, tmp_path / "weight_v1", out=tmp_path / "again.delta")
    # A bundle that deltas did not make has no name: the checksums tell.
    with pytest.raises(CaptureError, match="expected the adler32"):
        stagepack.delta(versions.a, tmp_path / "weight_v2", out=tmp_path / "2.delta")


def test_the_command_takes_the_next_version_of_a_chain(versions: Versions, tmp_path: Path) -> None:
    states = [versions.model(name).state_dict() for name in "abc"]
    chain: list[str] = []
    for number in (0, 1):
        names = {"version": f"{number + 1}", "base_version": f"{number}"}
        folder = publish(tmp_path / f"weight_v{number + 1}", states[number], states[number + 1], **names)
        out = str(tmp_path / f"{number}.delta")
        result = CliRunner().invoke(main, ["delta", str(versions.a), *chain, str(folder), "-o", out, "--json"])
        assert result.exit_code == 0, result.output
        chain += ["--delta", out]
    deltas = [tmp_path / "0.delta", tmp_path / "1.delta"]
    assert weight_files(stagepack.open(versions.a, deltas=deltas)) == weight_files(stagepack.open(versions.c))


def test_checksums_of_a_missing_package_are_told(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    states = [versions.model(name).state_dict() for name in "ab"]
    folder = publish(tmp_path / "weight_v1", *states, version="1", base_version="0")
    change_index(folder, checksum_format="xxh3-128")
    with pytest.raises(MissingPackageError, match="pip install xxhash"):
        stagepack.delta(versions.a, folder, out=tmp_path / "m.delta")
