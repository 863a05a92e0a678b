"""Open a bundle and read the requested parts of it.

Opening reads the manifest only. A graph is compared with its digest and checked against the rules before it is returned; so is the
header of a weight file.
"""

import copy
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from stagepack.errors import FileNotListedError, LimitError, Problem
from stagepack.format import limits
from stagepack.format.chunks import ByteProgress, check_content
from stagepack.format.file_checks import (
    check_digests,
    check_size,
    raise_digest_problems,
)
from stagepack.format.file_source import FileSource
from stagepack.format.graph import Graph, Weight
from stagepack.format.graph_reader import GraphFile, read_graph
from stagepack.format.manifest import Edge, File, Stage
from stagepack.format.manifest_reader import read_manifest
from stagepack.format.onnx import NEXT_STATE_PREFIX, STATE_PREFIX, OnnxModel, parse_onnx_model
from stagepack.format.upgrade import is_newer_minor
from stagepack.format.validate import (
    MANIFEST_NAME,
    SIGNATURE_NAME,
    check_onnx,
    check_stage,
    check_weights,
    format_names,
    raise_problems,
)
from stagepack.format.weights import StoredTensor, read_weight_header

EXAMPLE_FILE_NAME = "example.safetensors"


class OnnxFile(NamedTuple):
    """The content of an ONNX file.

    Attributes:
        content: the bytes of the file.
        model: the parts of the file that the rules O2 to O5 are about.
    """

    content: bytes
    model: OnnxModel


class Bundle:
    """An open bundle: its manifest, and its graphs and weight headers on request.

    ``stagepack.open`` returns it, for a path or a URL. It imports no torch and needs no `close`: every method opens the files that it
    reads and closes them again. The files of a remote bundle are downloaded by the first method that reads them.

    Attributes:
        path: the folder of the bundle; of a remote bundle, its folder in the cache, which may not have all files yet: see `fetch`.
        manifest: the checked manifest.
        source: where the files come from that the folder does not have; None for a local bundle.
        compares_digests: files are compared with their digests when they are read; see `without_digests`.

    Examples:
        List the stages and the tensors between them, then verify every file::

            bundle = stagepack.open("llama.stagepack")
            for stage_number, stage in enumerate(bundle.stages):
                print(stage_number, stage.inputs, stage.outputs, stage.weight_bytes)
            for edge in bundle.edges:
                print(edge.name, edge.dtype, edge.shape, edge.producer, edge.consumers)
            operators = {op.name for op in bundle.graph(0).ops}
            bundle.verify()
    """

    def __init__(self, path: str | os.PathLike[str], *, source: FileSource | None = None) -> None:
        """Read and check the manifest; no other file is read.

        Args:
            path: the folder of the bundle.
            source: where the files come from that the folder does not have.

        Raises:
            NotABundleError: there is no bundle at `path`.
            VersionError: the bundle is of a newer major version or needs an unknown feature.
            DigestError: the manifest was changed after it was written.
            LimitError: the manifest is over a limit.
            FormatError: the manifest breaks another rule.
        """
        self.path = Path(path)
        self.source = source
        self.manifest = read_manifest(self.path)
        self.compares_digests = True

    def __repr__(self) -> str:
        """The folder or URL, and the number of stages."""
        return f"<Bundle {self.location!r}, {len(self.stages)} stages>"

    @property
    def location(self) -> str:
        """The folder of the bundle, or the URL of a remote one."""
        return str(self.path) if self.source is None else self.source.location

    def without_digests(self) -> "Bundle":
        """Return the same bundle, whose graphs and other files are read without a comparison with their digests.

        The rules of the format are checked all the same. `check_digests` and `verify` still compare.
        """
        unverified_bundle = copy.copy(self)
        unverified_bundle.compares_digests = False
        return unverified_bundle

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The manifest entries of the stages, in order."""
        return self.manifest.stages

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The values that cross a boundary: the inputs of the model first, then in the order in which they are computed."""
        return self.manifest.edges

    @property
    def digest(self) -> str:
        """The SHA-256 of the manifest in hexadecimal. It identifies the bundle, because the manifest has the digests of all files."""
        return self.manifest.sha256

    @cached_property
    def files(self) -> dict[str, File]:
        """The entries of the files that the manifest lists, by file name."""
        return {file.name: file for file in self.manifest.files}

    @cached_property
    def _edge_of_name(self) -> dict[str, Edge]:
        return {edge.name: edge for edge in self.edges}

    @property
    def example(self) -> Path | None:
        """The path of the file with the example inputs and results, or None if the bundle has no example.

        In a remote bundle, `fetch` or `check_digests` downloads the file.
        """
        return self.path / EXAMPLE_FILE_NAME if EXAMPLE_FILE_NAME in self.files else None

    def stage(self, stage_number: int) -> Stage:
        """Return the manifest entry of one stage.

        Args:
            stage_number: the number of the stage, from 0. Negative numbers do not count from the end.

        Raises:
            IndexError: the bundle has no stage of this number.
        """
        if not 0 <= stage_number < len(self.stages):
            raise IndexError(f"expected a stage from 0 to {len(self.stages) - 1}, found {stage_number}")
        return self.stages[stage_number]

    def graph(self, stage_number: int) -> Graph:
        """Read the graph of a stage.

        Args:
            stage_number: the number of the stage, from 0.

        Returns:
            The unfolded graph, with module calls.

        Raises:
            IndexError: the bundle has no stage of this number.
            DigestError: the file is missing or differs from the one that the manifest lists.
            FormatError: the graph breaks a rule.
        """
        return self.graph_file(stage_number).graph

    def graph_file(self, stage_number: int, *, module_calls: bool = True) -> GraphFile:
        """Read the graph file of a stage.

        Args:
            stage_number: the number of the stage, from 0.
            module_calls: whether the unfolded graph has the module calls; leaving them out is faster.

        Returns:
            The graph as the file stores it, and unfolded.

        Raises:
            IndexError: the bundle has no stage of this number.
            DigestError: the file is missing or differs from the one that the manifest lists.
            FormatError: the graph breaks a rule.
        """
        stage = self.stage(stage_number)
        newer = is_newer_minor(self.manifest.version)
        graph_file = read_graph(self.read(stage.graph), stage.graph, newer=newer, module_calls=module_calls)
        raise_problems(check_stage(graph_file.graph, stage, self._edge_of_name))
        return graph_file

    def onnx_file(self, stage_number: int) -> OnnxFile:
        """Read the ONNX file of a stage and check it against the manifest and the headers of its weight files.

        If calls write weights of the stage, its graph is read too, for the types of these weights.

        Args:
            stage_number: the number of the stage, from 0.

        Raises:
            IndexError: the bundle has no stage of this number.
            FileNotListedError: the stage has no ONNX model.
            DigestError: a file is missing or differs from the one that the manifest lists.
            FormatError: the ONNX file, a header or the graph breaks a rule.
        """
        stage = self.stage(stage_number)
        if stage.onnx is None:
            raise FileNotListedError(
                f"{self.location}: stage {stage_number} has no ONNX model: add it with stagepack.add_onnx (stagepack onnx)"
            )
        file_name = stage.onnx.model
        content = self.read(file_name, limits.ONNX_BYTES)
        model = parse_onnx_model(content, file_name)
        headers = self._read_headers((*stage.weights, *stage.onnx.weights))
        expected_values: dict[str, Edge | Weight] = dict(self._edge_of_name)
        if stage.state:
            weights = self.graph_file(stage_number, module_calls=False).graph.weights
            written = [weight for weight in weights if weight.names[0] in stage.state]
            expected_values |= {
                f"{prefix}{weight.names[0]}": weight
                for weight in written
                for prefix in (STATE_PREFIX, NEXT_STATE_PREFIX)
            }
        raise_problems(check_onnx(model, stage, expected_values, dict(headers), file_name))
        return OnnxFile(content, model)

    def read(self, file_name: str, max_bytes: int = limits.GRAPH_BYTES) -> bytes:
        """Read a whole file into memory and compare it with its digest. Use it for files other than weight files.

        Bundles of `without_digests` do not compare.

        Args:
            file_name: the name of a file that the manifest lists.
            max_bytes: refuse a larger file.

        Raises:
            FileNotListedError: the manifest does not list the file.
            DigestError: the file is missing or differs from the one that the manifest lists.
            LimitError: the manifest states more than `max_bytes`.
        """
        entry = self._entry(file_name)
        if entry.size > max_bytes:
            message = f"expected at most {max_bytes} bytes, found {entry.size}"
            raise LimitError([Problem(rule="L1", where=file_name, message=message)])
        self.fetch([file_name])
        raise_digest_problems(check_size(self.path, entry))
        content = (self.path / file_name).read_bytes()
        if self.compares_digests:
            raise_digest_problems(check_content(entry, content))
        return content

    def tensors(self, stage_number: int, graph: Graph) -> dict[str, tuple[Path, StoredTensor]]:
        """Locate the bytes of a stage's weights. Reads the headers of its weight files, not their data.

        Args:
            stage_number: the number of the stage, from 0.
            graph: the graph of this stage, whose weights are compared with the headers.

        Returns:
            The file and the byte range of each stored tensor, by name; see `Weight.stored`.

        Raises:
            IndexError: the bundle has no stage of this number.
            DigestError: a file is missing or has another size.
            FormatError: a header breaks a rule, or a weight of the graph does not fit its stored tensor (W7).
        """
        stage = self.stage(stage_number)
        headers = self._read_headers(stage.weights)
        raise_problems(check_weights(graph.weights, headers, stage.graph))
        return {tensor.name: (self.path / file_name, tensor) for file_name, tensors in headers for tensor in tensors}

    def check_digests(self, file_names: Iterable[str], progress: ByteProgress | None = None) -> None:
        """Compare files with their digests, in as many threads as there are processors.

        Args:
            file_names: the names of files that the manifest lists.
            progress: called by the threads with the number of bytes that were compared.

        Raises:
            FileNotListedError: the manifest does not list a file.
            DigestError: files are missing or differ from those that the manifest lists.
        """
        raise_digest_problems(self._digest_problems([self._entry(file_name) for file_name in file_names], progress))

    def fetch(self, file_names: Iterable[str]) -> None:
        """Download files of a remote bundle, several at a time, unless its folder in the cache has them. A local bundle has all files.

        Args:
            file_names: the names of files that the manifest lists.

        Raises:
            FileNotListedError: the manifest does not list a file.
            RemoteError: a file cannot be downloaded.
            DigestError: the server has other files than the manifest lists.
            WriteError: the cache cannot be written.
        """
        if self.source is not None:
            self.source.fetch([self._entry(file_name) for file_name in file_names])

    def verify(self, progress: ByteProgress | None = None) -> None:
        """Check the digest of every file and every rule of the format. Reads the whole bundle.

        Args:
            progress: called by several threads with the number of bytes that were compared with their digests.

        Raises:
            DigestError: files are missing, changed or not listed.
            FormatError: a rule is broken.
        """
        problems = self._digest_problems(self.manifest.files, progress)
        unlisted = sorted(set(os.listdir(self.path)) - set(self.files) - {MANIFEST_NAME, SIGNATURE_NAME})
        problems += [
            Problem(rule="D4", where=file_name[:200], message="the file is not listed in the manifest")
            for file_name in unlisted
        ]
        raise_digest_problems(problems)
        for stage_number, stage in enumerate(self.stages):
            self.tensors(stage_number, self.graph(stage_number))
            if stage.onnx is not None:
                self.onnx_file(stage_number)
        if self.example:
            read_weight_header(self.example)

    def _digest_problems(self, entries: Sequence[File], progress: ByteProgress | None) -> list[Problem]:
        """Compare files with their digests; those of a remote bundle that were damaged in the cache are downloaded again, once."""
        self.fetch(entry.name for entry in entries)
        problems = check_digests(self.path, entries, progress)
        if self.replace_damaged(problems):
            problems = check_digests(self.path, entries, progress)
        return problems

    def replace_damaged(self, problems: Iterable[Problem]) -> bool:
        """Download files again that were damaged in the cache.

        Args:
            problems: those of files that differ from the manifest.

        Returns:
            Whether files were downloaded: there are problems, and the bundle is a remote one.

        Raises:
            RemoteError, DigestError, WriteError: see `fetch`.
        """
        damaged = [self._entry(problem.where) for problem in problems]
        if not damaged or self.source is None:
            return False
        self.source.discard(damaged)
        self.source.fetch(damaged)
        return True

    def _entry(self, file_name: str) -> File:
        if file_name not in self.files:
            listed = format_names(sorted(self.files))
            raise FileNotListedError(f"{self.location}: expected one of the files {listed}, found {file_name[:200]!r}")
        return self.files[file_name]

    def _read_headers(self, file_names: Iterable[str]) -> list[tuple[str, tuple[StoredTensor, ...]]]:
        """The name and the tensors of each weight file."""
        file_names = tuple(file_names)
        self.fetch(file_names)
        headers = []
        for file_name in file_names:
            raise_digest_problems(check_size(self.path, self._entry(file_name)))
            headers.append((file_name, tuple(read_weight_header(self.path / file_name).values())))
        return headers
