"""Open a bundle and read what is asked for, checked (DESIGN: only what is asked for is read).

Opening reads the manifest alone. A graph is read, compared with its digest and checked by the rules before it is
given out; likewise the header of a weight file.
"""

import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from stagepack.errors import DigestError, LimitError, NotABundleError, Problem
from stagepack.format import limits
from stagepack.format.codec import convert_manifest, decode_graph, parse_json
from stagepack.format.digest import sha256_of, sha256_of_file, stated_and_actual_digest
from stagepack.format.dtypes import ITEM_SIZE, STORED_NAME, stored_shape
from stagepack.format.folded import FoldedGraph
from stagepack.format.graph import Graph, Weight
from stagepack.format.manifest import Edge, File, Manifest, Stage
from stagepack.format.onnx import NEXT, STATE, OnnxModel, parse_onnx_model
from stagepack.format.unfold import unfold_graph
from stagepack.format.upgrade import check_version, is_newer_minor
from stagepack.format.validate import (
    MANIFEST_NAME,
    SIGNATURE_NAME,
    check_folded,
    check_graph,
    check_manifest,
    check_onnx,
    check_stage,
    raise_problems,
)
from stagepack.format.weights import StoredTensor, read_weight_header

EXAMPLE_FILE_NAME = "example.safetensors"


class GraphFile(NamedTuple):
    """What a graph file holds: equal parts once, and all of it."""

    folded: FoldedGraph
    graph: Graph


class OnnxFile(NamedTuple):
    """What an ONNX file holds: its bytes, and what was checked of them."""

    content: bytes
    model: OnnxModel


def read_graph(content: bytes, where: str, *, newer: bool = False, calls: bool = True) -> GraphFile:
    """Read the content of a graph file, checked; of a bundle of a `newer` minor version or not, with the `calls` of modules or not.

    Raises:
        FormatError: it breaks rules.
    """
    folded = decode_graph(content, where, newer=newer)
    raise_problems(check_folded(folded, where))
    graph = unfold_graph(folded, where, calls=calls)
    raise_problems(check_graph(graph, where))
    return GraphFile(folded, graph)


class Bundle:
    """An opened bundle: its manifest, and its graphs and weight headers on demand.

    Attributes:
        path: the folder.
        manifest: the manifest, checked.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read and check the manifest.

        Raises:
            NotABundleError: there is no bundle at `path`.
            VersionError: a newer major version or an unknown feature.
            FormatError: the manifest breaks rules; with `DigestError` and `LimitError` as the special cases.
        """
        self.path = Path(path)
        self.manifest = _read_manifest(self.path)

    def __repr__(self) -> str:
        """A line that names the folder and the number of stages."""
        return f"<Bundle {str(self.path)!r}, {len(self.stages)} stages>"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in order."""
        return self.manifest.stages

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The values that cross the boundaries: inputs of the model first, then in the order of their making."""
        return self.manifest.edges

    @property
    def digest(self) -> str:
        """The SHA-256 that names this bundle: of the manifest, which holds those of all files."""
        return self.manifest.sha256

    @cached_property
    def files(self) -> dict[str, File]:
        """The files that the manifest lists, by name."""
        return {file.name: file for file in self.manifest.files}

    @cached_property
    def _edge(self) -> dict[str, Edge]:
        return {edge.name: edge for edge in self.edges}

    @property
    def example(self) -> Path | None:
        """The file with the example's inputs and results, if the bundle has one."""
        return self.path / EXAMPLE_FILE_NAME if EXAMPLE_FILE_NAME in self.files else None

    def graph(self, stage: int) -> Graph:
        """Read the graph of a stage.

        Raises:
            DigestError: the file is missing or is not the one that the manifest lists.
            FormatError: it breaks rules.
        """
        return self.graph_file(stage).graph

    def graph_file(self, stage: int, *, calls: bool = True) -> GraphFile:
        """Read the graph of a stage: as the file holds it, and unfolded, with the `calls` of modules or without, which is faster.

        Raises:
            DigestError: the file is missing or is not the one that the manifest lists.
            FormatError: it breaks rules.
        """
        name = self.stages[stage].graph
        file = read_graph(self.read(name), name, newer=is_newer_minor(self.manifest.version), calls=calls)
        raise_problems(check_stage(file.graph, self.stages[stage], self._edge))
        return file

    def onnx_file(self, stage: int) -> OnnxFile:
        """Read the ONNX file of a stage that has one; the headers of the weight files that it refers to, and its graph if it has state.

        Raises:
            DigestError: a file is missing or is not the one that the manifest lists.
            FormatError: it breaks rules.
        """
        entry = self.stages[stage]
        assert entry.onnx is not None
        name = entry.onnx.model
        content = self.read(name, limits.ONNX_BYTES)
        model = parse_onnx_model(content, name)
        stored = {}
        for weights in (*entry.weights, *entry.onnx.weights):
            raise_digest_problems(self.check_size(weights))
            stored[weights] = tuple(read_weight_header(self.path / weights).values())
        written = (
            {weight.names[0]: weight for weight in self.graph_file(stage, calls=False).graph.weights}
            if entry.state
            else {}
        )
        values = self._edge | {
            prefix + one: written[one] for one in entry.state if one in written for prefix in (STATE, NEXT)
        }
        raise_problems(check_onnx(model, entry, values, stored, name))
        return OnnxFile(content, model)

    def read(self, name: str, limit: int = limits.GRAPH_BYTES) -> bytes:
        """Read a whole file that is not a weight file, of at most `limit` bytes, compared with its digest.

        Raises:
            DigestError: the file is missing or is not the one that the manifest lists.
            LimitError: the manifest states a size over the limit.
        """
        if self.files[name].size > limit:
            raise LimitError([Problem(rule="L1", where=name, message=f"over the limit of {limit} bytes")])
        raise_digest_problems(self.check_size(name))
        content = (self.path / name).read_bytes()
        found = sha256_of(content)
        if found != self.files[name].sha256:
            raise DigestError([_changed(self.files[name], found)])
        return content

    def tensors(self, stage: int, graph: Graph) -> dict[str, tuple[Path, StoredTensor]]:
        """Where the bytes of a stage's weights lie: stored name -> file and place.

        Reads the headers of the stage's weight files, not their data.

        Raises:
            DigestError: a file is missing or has another size.
            FormatError: a header breaks rules, or a weight of the graph is not there as the graph says (W7).
        """
        found: dict[str, tuple[Path, StoredTensor]] = {}
        for name in self.stages[stage].weights:
            raise_digest_problems(self.check_size(name))
            index = read_weight_header(self.path / name)
            twice = sorted(found.keys() & index.keys())
            raise_problems(
                Problem(rule="W7", where=name, message=f"{tensor[:80]!r} is in another file too") for tensor in twice
            )
            found.update((tensor, (self.path / name, place)) for tensor, place in index.items())
        raise_problems(
            problem for weight in graph.weights for problem in _check_weight(weight, found, self.stages[stage].graph)
        )
        return found

    def check_size(self, name: str) -> list[Problem]:
        """The problem with the existence or size of a file (D1), if there is one. Reads no data."""
        expected = self.files[name]
        try:
            status = (self.path / name).lstat()
        except OSError:
            return [Problem(rule="D1", where=name, message="the file is missing")]
        if not _is_plain_file(self.path / name):
            return [Problem(rule="D1", where=name, message="not a plain file")]
        if status.st_size != expected.size:
            return [Problem(rule="D1", where=name, message=f"expected {expected.size} bytes, found {status.st_size}")]
        return []

    def check_digest(self, name: str) -> list[Problem]:
        """The problem with the size or content of a file (D1, D2), if there is one. Reads all of it."""
        problems = self.check_size(name)
        if not problems and (found := sha256_of_file(self.path / name)) != self.files[name].sha256:
            problems = [_changed(self.files[name], found)]
        return problems

    def check_digests(self, names: Iterable[str]) -> None:
        """Compare files with their digests, several at a time.

        Raises:
            DigestError: files are missing or are not those that the manifest lists.
        """
        raise_digest_problems(self._digest_problems(names))

    def _digest_problems(self, names: Iterable[str]) -> list[Problem]:
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - 20 ms that opening a bundle has no use for

        with ThreadPoolExecutor() as pool:
            return [problem for problems in pool.map(self.check_digest, names) for problem in problems]

    def verify(self) -> None:
        """Check every file and every rule.

        Raises:
            DigestError: files are missing, changed or not listed.
            FormatError: rules are broken.
        """
        problems = self._digest_problems(self.files)
        extra = sorted(set(os.listdir(self.path)) - set(self.files) - {MANIFEST_NAME, SIGNATURE_NAME})
        problems += [
            Problem(rule="D4", where=name[:200], message="the file is not listed in the manifest") for name in extra
        ]
        raise_digest_problems(problems)
        for stage in range(len(self.stages)):
            self.tensors(stage, self.graph(stage))
            if self.stages[stage].onnx is not None:
                self.onnx_file(stage)
        if self.example:
            read_weight_header(self.example)


def raise_digest_problems(problems: list[Problem]) -> None:
    """Raise one `DigestError` with all the problems, if there are any."""
    if problems:
        raise DigestError(problems)


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_NAME
    if not _is_plain_file(path):
        raise NotABundleError(f"{folder}: not a stagepack bundle: expected a folder with a file {MANIFEST_NAME} [M1]")
    if path.stat().st_size > limits.MANIFEST_BYTES:
        raise LimitError(
            [Problem(rule="L1", where=MANIFEST_NAME, message=f"over the limit of {limits.MANIFEST_BYTES} bytes")]
        )
    content = path.read_bytes()
    fields = parse_json(content, MANIFEST_NAME)
    if not isinstance(fields, dict) or fields.get("format") != "stagepack":
        raise NotABundleError(f'{path}: not a stagepack manifest: expected the field "format": "stagepack" [M1]')
    check_version(fields, MANIFEST_NAME)
    stated, found = stated_and_actual_digest(content)
    if stated != found:
        message = f"its digest is {found}, it states {stated}: the file was changed"
        raise DigestError([Problem(rule="D3", where=MANIFEST_NAME, message=message)])
    manifest = convert_manifest(fields, MANIFEST_NAME)
    raise_problems(check_manifest(manifest))
    return manifest


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _changed(file: File, found: str) -> Problem:
    return Problem(
        rule="D2", where=file.name, message=f"the content was changed: expected sha256 {file.sha256}, found {found}"
    )


def _check_weight(weight: Weight, found: dict[str, tuple[Path, StoredTensor]], where: str) -> Iterator[Problem]:
    """The disagreements of a weight of the graph with the tensor that holds its bytes (W7)."""
    name = weight.names[0][:80]
    if weight.zeros:
        if weight.stored in found:
            yield Problem(
                rule="W7", where=where, message=f"the weight {name!r} is all zeros, but a weight file holds it"
            )
        return
    if weight.stored not in found:
        yield Problem(rule="W7", where=where, message=f"the weight {name!r} is in none of the stage's weight files")
        return
    tensor = found[weight.stored][1]
    if weight.base is None:
        stored = (STORED_NAME[weight.dtype], stored_shape(weight.dtype, weight.shape))
        if (tensor.dtype, tensor.shape) != stored:
            message = f"the weight {name!r} is {weight.dtype} {list(weight.shape)}, its file has {tensor.dtype} {list(tensor.shape)}"
            yield Problem(rule="W7", where=where, message=message)
        return
    strides = weight.strides or ()
    last = weight.offset + sum((size - 1) * stride for size, stride in zip(weight.shape, strides, strict=True))
    if 0 not in weight.shape and (last + 1) * ITEM_SIZE[weight.dtype] > tensor.end - tensor.start:
        yield Problem(rule="W7", where=where, message=f"the view {name!r} reaches past the end of {weight.base[:80]!r}")
