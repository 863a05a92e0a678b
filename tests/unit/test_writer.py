"""Bundles and weight files as they are written: aligned, in order, sealed, the same each time, and readable with other tools."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import stagepack
from stagepack.errors import FormatError, LimitError, WriteError
from stagepack.format import limits
from stagepack.format.dtypes import HEADER_DTYPES, ITEM_SIZE, stored_shape
from stagepack.format.manifest import Edge, EntryPoint, Manifest, Producer, Stage
from stagepack.format.reader import Bundle
from stagepack.format.rules import PADDING_PREFIX
from stagepack.format.tree import Parameter, SequenceTree, Signature, Tree, ValueLeaf
from stagepack.format.weights import ALIGNMENT, TensorSpec, read_weight_header, tensor_layout, weight_file_header
from stagepack.format.writer import BundleWriter, check_output_path
from tests.conformance import tiny

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: not name.startswith(PADDING_PREFIX) and name != "__metadata__"
)
SPECS = st.lists(
    st.builds(
        TensorSpec,
        name=NAMES,
        dtype=st.sampled_from(sorted(ITEM_SIZE)),
        shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    unique_by=lambda spec: spec.name,
    max_size=8,
)


def content(spec: TensorSpec) -> bytes:
    """Bytes that only this tensor has."""
    return bytes(hashlib.shake_128(spec.name.encode()).digest(spec.nbytes))


def weight_file(specs: list[TensorSpec]) -> bytes:
    head, gaps = weight_file_header(specs)
    return head + b"".join(bytes(gap) + content(spec) for gap, spec in zip(gaps, specs, strict=True))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(specs=SPECS)
@example(specs=[])
def test_a_weight_file_is_read_as_it_was_written_also_by_safetensors(
    specs: list[TensorSpec], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    path.write_bytes(weight_file(specs))
    index = read_weight_header(path)
    assert list(index) == [spec.name for spec in specs]
    assert list(index.values()) == tensor_layout(specs)
    whole = path.read_bytes()
    for spec in specs:
        place = index[spec.name]
        assert place.start % ALIGNMENT == 0
        assert whole[place.start : place.end] == content(spec)
        assert (place.dtype, place.shape) == (HEADER_DTYPES[spec.dtype], stored_shape(spec.dtype, spec.shape))
    start = 8 + int.from_bytes(whole[:8], "little")
    assert start % ALIGNMENT == 0
    assert len(whole) - start - sum(spec.nbytes for spec in specs) < ALIGNMENT * max(1, len(specs))
    with safe_open(path, framework="pt") as file:
        assert {name for name in file.keys() if not name.startswith(PADDING_PREFIX)} == set(index)  # noqa: SIM118 - not a dict
        for spec in specs:
            part = file.get_slice(spec.name)
            assert (part.get_dtype(), tuple(part.get_shape())) == (index[spec.name].dtype, index[spec.name].shape)


def test_a_bundle_lists_all_its_files_with_size_and_digest(tmp_path: Path) -> None:
    tiny.write(tmp_path / "m.stagepack")
    files = {path.name: path.read_bytes() for path in (tmp_path / "m.stagepack").iterdir()}
    manifest = files.pop("manifest.json")
    fields = json.loads(manifest)
    listed = {file["name"]: (file["size"], file["blake3"]) for file in fields["files"]}
    assert listed == {name: (len(held), blake3(held).hexdigest()) for name, held in files.items()}
    zeros = manifest.replace(fields["sha256"].encode(), b"0" * 64)
    assert hashlib.sha256(zeros).hexdigest() == fields["sha256"] == Bundle(tmp_path / "m.stagepack").digest


@pytest.mark.parametrize("name", ["m", "m.stagepack", "a b", "é", ".m", "m.", "-m", "x" * 200])
def test_a_bundle_may_have_any_name(name: str, tmp_path: Path) -> None:
    tiny.write(tmp_path / name)
    Bundle(tmp_path / name).verify()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_name_may_be_relative_and_end_with_a_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with BundleWriter("m.stagepack/", overwrite=False) as writer:
        write(writer, manifest())
    Bundle("m.stagepack").check_digests(["stage-0.msgpack"])
    assert [path.name for path in tmp_path.iterdir()] == ["m.stagepack"]


def write(writer: BundleWriter, described: Manifest) -> None:
    """Write a bundle of one file that is not a graph; the writer does not look into files."""
    writer.write_file("stage-0.msgpack", [b"graph"])
    writer.finish(described)


def manifest(result: Tree = ValueLeaf("x")) -> Manifest:  # noqa: B008 - frozen
    """The manifest of a model that gives its input back."""
    forward = EntryPoint(
        name="forward",
        signature=Signature(parameters=(Parameter(name="x", tree=ValueLeaf("x"), positional=True),), result=result),
        stages=(Stage(graph="stage-0.msgpack"),),
        edges=(Edge(name="x", dtype="float32"),),
    )
    return Manifest(
        format="stagepack",
        version="1.0",
        producer=Producer(stagepack="0", torch="0"),
        entry_points=(forward,),
        files=(),
        device="cpu",
        sha256="",
    )


def nested(depth: int) -> Tree:
    tree: Tree = ValueLeaf("x")
    for _ in range(depth):
        tree = SequenceTree(kind="list", items=(tree,))
    return tree


def finish(out: Path, described: Manifest) -> None:
    with BundleWriter(out, overwrite=False) as writer:
        write(writer, described)


def test_a_manifest_that_no_reader_takes_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="the result has the value 'ghost', which no edge carries"):
        finish(tmp_path / "m.stagepack", manifest(ValueLeaf("ghost")))
    with pytest.raises(LimitError, match=f"nested deeper than {limits.NESTING_DEPTH}"):
        finish(tmp_path / "m.stagepack", manifest(nested(limits.NESTING_DEPTH + 1)))
    assert list(tmp_path.iterdir()) == []
    finish(tmp_path / "m.stagepack", manifest(nested(limits.NESTING_DEPTH)))
    Bundle(tmp_path / "m.stagepack")


def test_an_output_is_checked_without_touching_anything(tmp_path: Path) -> None:
    check_output_path(tmp_path / "m.stagepack", overwrite=False)
    check_output_path(tmp_path / "m.stagepack", overwrite=True)
    with pytest.raises(WriteError, match=f"expected the folder {tmp_path}/missing to exist"):
        check_output_path(tmp_path / "missing" / "m.stagepack", overwrite=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_is_kept_is_linked_or_else_copied(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tiny.stagepack"
    tiny.write(folder)
    bundle = Bundle(folder)
    before = {name: (folder / name).stat().st_ino for name in bundle.files}
    if not links:

        def refuse(*_: object) -> None:
            raise OSError("no links here")

        monkeypatch.setattr("os.link", refuse)
    with BundleWriter(folder, overwrite=True) as writer:
        for file in bundle.manifest.files:
            writer.link_file(folder / file.name, file)
        writer.finish(bundle.manifest)
    Bundle(folder).verify()
    assert {name: (folder / name).stat().st_ino == inode for name, inode in before.items()} == dict.fromkeys(
        before, links
    )
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.stagepack"}


def test_a_disk_that_fails_after_the_rename_is_told_truly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        if path == tmp_path:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("stagepack.format.writer.synchronize", fail)
    with pytest.raises(WriteError, match=r"is written and complete, .* Input/output error"):
        stagepack.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), out=tmp_path / "m.stagepack")
    stagepack.open(tmp_path / "m.stagepack").verify()
