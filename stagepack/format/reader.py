"""Open a bundle and read the requested parts of it.

Opening reads the manifest only. A graph is compared with its digest and checked against the rules before it is returned; so is the
header of a weight file.
"""

# Long because the documentation of the public methods is.
import copy
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

from msgspec.msgpack import encode

from stagepack.errors import EntryPointError, FileNotListedError, OptionError
from stagepack.format import limits
from stagepack.format.bundle_files import BundleFiles
from stagepack.format.chunk_reads import ByteProgress
from stagepack.format.file_source import FileSource, FileStream
from stagepack.format.graph import Graph, Weight
from stagepack.format.graph_codec import GraphFile, KeptGraphs
from stagepack.format.manifest import Edge, EntryPoint, Onnx, Stage, format_inputs, format_stage_count
from stagepack.format.onnx import NEXT_STATE_PREFIX, STATE_PREFIX, OnnxModel, parse_onnx_model
from stagepack.format.operators import needed_permissions
from stagepack.format.rules import INDEX_NAME, format_names, raise_problems
from stagepack.format.upgrade import is_newer_minor
from stagepack.format.validate.files import (
    NamedWeights,
    check_example,
    check_index,
    check_onnx,
    check_weights,
    weight_bytes,
)
from stagepack.format.validate.stage_rules import EntryPointFacts, check_stage
from stagepack.format.validate.whole_model import check_plan, check_whole_model
from stagepack.format.weights import StoredTensor


class OnnxFile(NamedTuple):
    """The content of an ONNX file, and the parts of it that the rules O2 to O5 are about."""

    content: bytes
    model: OnnxModel


class Bundle(BundleFiles):
    """An open bundle: its manifest, and its graphs and weight headers on request.

    ``stagepack.open`` returns it, for a path or a URL. It imports no torch and needs no `close`: every method opens the files that it
    reads and closes them again. The files of a remote bundle are downloaded by the first method that reads them.

    A bundle with several entry points is opened at one of them, or at none; see `select`. Stages, edges, graphs and the example are
    taken from the selected entry point. The only entry point of other bundles is selected.

    Attributes:
        path: the folder of the bundle; of a remote bundle, its folder in the cache, which may not have all files yet: see `fetch`.
        manifest: the checked manifest.
        source: where the files come from that the folder does not have; None for a local bundle.
        compares_digests: files are compared with their digests when they are read; see `without_digests`.
        selected: the selected entry point, or None.

    Raises:
        NotABundleError: there is no bundle at the path.
        VersionError: the bundle is of a newer major version or needs an unknown feature.
        DigestError: the manifest was changed after it was written.
        LimitError: the manifest is over a limit.
        FormatError: the manifest breaks another rule.

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

    # The package sets it: what draws a report is above this module.
    notebook_view: ClassVar[Callable[["Bundle"], str] | None] = None

    def __init__(self, path: str | os.PathLike[str], *, source: FileSource | None = None) -> None:
        super().__init__(path, source=source)
        # Shared with the bundles that `select` returns; None to read a graph file at each request.
        self._kept_graphs: KeptGraphs | None = None
        self.selected = self.entry_points[0] if len(self.entry_points) == 1 else None

    def __repr__(self) -> str:
        """The folder or URL, the number of stages, and the inputs; of several entry points the numbers of stages."""
        if self.selected is not None:
            return (
                f"<Bundle {self.location!r}, {format_stage_count(len(self.stages))}, {format_inputs(self.entry_point)}>"
            )
        counts = ", ".join(
            f"{entry_point.name}: {format_stage_count(len(entry_point.stages))}" for entry_point in self.entry_points
        )
        return f"<Bundle {self.location!r}, {counts}>"

    def _repr_html_(self) -> str | None:
        return None if Bundle.notebook_view is None else Bundle.notebook_view(self)

    @property
    def entry_points(self) -> tuple[EntryPoint, ...]:
        """All entry points, in the order of the manifest."""
        return self.manifest.entry_points

    @property
    def entry_point(self) -> EntryPoint:
        """The selected entry point.

        Raises:
            EntryPointError: the bundle has several, and none is selected.
        """
        if self.selected is None:
            raise EntryPointError(
                f"{self.location}: the bundle has the entry points {self._entry_point_names}: choose one, as in "
                f"{self.location}#{self.entry_points[0].name}"
            )
        return self.selected

    def select(self, name: str) -> "Bundle":
        """Return the same bundle at another entry point.

        Args:
            name: the name of an entry point.

        Raises:
            EntryPointError: the bundle has no entry point of this name.
        """
        by_name = {entry_point.name: entry_point for entry_point in self.entry_points}
        if name not in by_name:
            expected = f"expected one of the entry points {self._entry_point_names}"
            raise EntryPointError(f"{self.location}: {expected}, found {name[:80]!r}")
        selected_bundle = copy.copy(self)
        selected_bundle.selected = by_name[name]
        selected_bundle.__dict__.pop("_facts", None)
        return selected_bundle

    def with_graphs_kept(self) -> Self:
        """Return the same bundle, which reads each graph file once: for all stages of all its entry points that have the file."""
        vars(bundle := copy.copy(self))["_kept_graphs"] = KeptGraphs()
        return bundle

    @property
    def _entry_point_names(self) -> str:
        return format_names([entry_point.name for entry_point in self.entry_points])

    @property
    def location(self) -> str:
        """The folder of the bundle, or the URL of a remote one; with ``#NAME`` if one of several entry points is selected."""
        return super().location + self.fragment

    @property
    def fragment(self) -> str:
        """``#NAME`` if one of several entry points is selected, else nothing. `stagepack.open` takes it after a path or a URL."""
        return f"#{self.selected.name}" if self.selected is not None and len(self.entry_points) > 1 else ""

    @property
    def identity(self) -> str:
        """The digest, with ``#NAME`` if one of several entry points is selected: what belongs to this entry point names it by that."""
        return self.digest + self.fragment

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The manifest entries of the stages, in order."""
        return self.entry_point.stages

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The values that cross a boundary: the inputs of the model first, then in the order in which they are computed."""
        return self.entry_point.edges

    @property
    def inputs(self) -> tuple[Edge, ...]:
        """The inputs of the model: their names, dtypes and shapes."""
        return self.entry_point.inputs

    @cached_property
    def _facts(self) -> EntryPointFacts:
        return EntryPointFacts.of(self.entry_point)

    @property
    def example(self) -> Path | None:
        """The path of the file with the example inputs and results, or None if the entry point has no example.

        In a remote bundle, `fetch` or `check_digests` downloads the file.
        """
        return None if self.entry_point.example is None else self.path / self.entry_point.example

    @property
    def stored(self) -> "Bundle":
        """The bundle in the stages of its files: itself, unless it is one of `stagepack.partition.joined_bundle`."""
        return self

    def stored_stages(self, stage_number: int) -> range:
        """Return the numbers of the stored stages that a stage consists of."""
        return range(stage_number, stage_number + 1)

    def node_numbers(self, stage_number: int) -> list[int]:
        """Return the position of each node of a stage in the list of nodes of the whole model; -1 for a node that a cut added."""
        return self.stage(stage_number).node_numbers

    def stage(self, stage_number: int) -> Stage:
        """Return the manifest entry of one stage.

        Args:
            stage_number: the number of the stage, from 0. Negative numbers do not count from the end.

        Raises:
            IndexError, OptionError: the bundle has no stage of this number, or it is no number.
        """
        if not isinstance(stage_number, int):
            raise OptionError(f"{self.location}: stage: expected a number, found {stage_number!r}")
        if stage_number not in range(count := len(self.stages)):
            raise IndexError(f"{self.location}: expected a stage from 0 to {count - 1}, found {stage_number}")
        return self.stages[stage_number]

    def graph(self, stage_number: int) -> Graph:
        """Read the graph of a stage.

        Args:
            stage_number: the number of the stage, from 0.

        Returns:
            The unfolded graph, with module calls.

        Raises:
            IndexError, DigestError, FormatError: see `graph_file`.
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
        kept_graphs = self._kept_graphs if self.compares_digests else None
        graph_file, stage_graph = (kept_graphs or KeptGraphs()).read(
            self.files[stage.graph], lambda: self.read(stage.graph), newer=newer, module_calls=module_calls
        )
        raise_problems(check_stage(stage_graph, stage, self._facts))
        return graph_file

    def graphs(self) -> tuple[Graph, ...]:
        """Read the graphs of all stages, in order and unfolded, which must be the parts of one model.

        Raises:
            DigestError: a file is missing or differs from the one that the manifest lists.
            FormatError: a graph breaks a rule, or the stages do not fit together (G18, G19).
        """
        graphs = tuple(self.graph(stage_number) for stage_number in range(len(self.stages)))
        checked_models = (self._kept_graphs or KeptGraphs()).models
        model = encode(
            ([(self.files[stage.graph].blake3, stage.added, stage.places) for stage in self.stages], self.inputs)
        )
        if model not in checked_models:
            raise_problems(check_whole_model(self.entry_point, graphs))
            checked_models.add(model)
        return graphs

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
        headers = self.read_headers((*stage.weights, *stage.onnx.weights))
        graph = self.graph_file(stage_number, module_calls=False).graph if stage.state else Graph()
        values = _onnx_values(stage, self._facts.edges, graph)
        raise_problems(check_onnx(model, stage, values, dict(headers), file_name))
        return OnnxFile(content, model)

    def tensors(
        self,
        stage_number: int,
        graph: Graph,
        stream: FileStream | None = None,
        named_weights: NamedWeights | None = None,
    ) -> dict[str, tuple[Path, StoredTensor]]:
        """Locate the bytes of a stage's weights. Reads the headers of its weight files, not their data.

        Args:
            stage_number: the number of the stage, from 0.
            graph: the graph of this stage, whose weights are compared with the headers.
            stream: reads the weight files while they are downloaded; None to download them first.
            named_weights: the weights of the stages that are read with this one, which it is compared with and added to; None for a
                stage alone.

        Returns:
            The file and the byte range of each stored tensor, by name; see `Weight.stored`.

        Raises:
            IndexError: there is no stage of this number.
            DigestError: a file is missing or has another size.
            FormatError: a header breaks a rule, or a weight of the graph does not fit its stored tensor (W7), or
                differs from one of the same name in another stage (W8), or the manifest states other bytes or files (W9).
        """
        stage = self.stage(stage_number)
        headers = self.read_headers(stage.weights, stream)
        raise_problems(check_weights(graph.weights, headers, stage, named_weights or NamedWeights()))
        return {
            tensor_name: (self.path / file_name, tensor)
            for file_name, tensors in headers
            for tensor_name, tensor in tensors.items()
        }

    def verify(self, progress: ByteProgress | None = None, *, strict: bool = False) -> None:
        """Check the digest of every file and every rule of the format. Reads the whole bundle.

        Args:
            progress: called by several threads with the number of bytes that were compared with their digests.
            strict: refuse files that the manifest does not list, such as ``README.md``; see `unlisted_files`.

        Raises:
            DigestError: files are missing or changed, or not listed if `strict`.
            FormatError: a rule is broken.
        """
        raise_problems([*self.digest_problems(self.listed, progress), *(self.unlisted_problems() if strict else ())])
        check_all_stages(self)


def _onnx_values(stage: Stage, edge_of_name: Mapping[str, Edge], graph: Graph) -> dict[str, Edge | Weight]:
    """The edges of a stage, and the weights that calls write, by the names of inputs and outputs of its ONNX model."""
    values: dict[str, Edge | Weight] = {
        edge_name: edge_of_name[edge_name] for edge_name in (*stage.inputs, *stage.outputs)
    }
    state_names = set(stage.state)
    for weight in graph.weights:
        if weight.names[0] in state_names:
            values |= {f"{prefix}{weight.names[0]}": weight for prefix in (STATE_PREFIX, NEXT_STATE_PREFIX)}
    return values


def check_all_stages(bundle: Bundle) -> None:
    """Check every rule on the stages and the examples of all entry points, which may share files: each file is read once."""
    bundle = bundle.with_graphs_kept()
    stages_of_onnx: dict[str, list[tuple[Stage, Onnx, dict[str, Edge | Weight]]]] = {}
    headers: dict[str, dict[str, StoredTensor]] = {}
    named_weights = NamedWeights()

    def read_headers(file_names: Iterable[str]) -> dict[str, dict[str, StoredTensor]]:
        file_names = tuple(file_names)
        headers.update(bundle.read_headers(file_name for file_name in file_names if file_name not in headers))
        return {file_name: headers[file_name] for file_name in file_names}

    for entry_point in bundle.entry_points:
        selected = bundle.select(entry_point.name)
        graphs = selected.graphs()
        stored: dict[str, StoredTensor] = {}
        for stage, graph in zip(entry_point.stages, graphs, strict=True):
            tensors_of_file = read_headers(stage.weights)
            raise_problems(check_weights(graph.weights, tensors_of_file.items(), stage, named_weights))
            stored |= {name: tensor for tensors in tensors_of_file.values() for name, tensor in tensors.items()}
            if stage.onnx is not None:
                values = _onnx_values(stage, {edge.name: edge for edge in entry_point.edges}, graph)
                stages_of_onnx.setdefault(stage.onnx.model, []).append((stage, stage.onnx, values))
        weights = [weight for graph in graphs for weight in graph.weights]
        raise_problems(check_plan(entry_point, graphs, weight_bytes(weights, stored)))
        if entry_point.example is not None:
            [tensors] = read_headers([entry_point.example]).values()
            raise_problems(check_example(entry_point, tensors))
    if INDEX_NAME in bundle.files:
        raise_problems(check_index(bundle.read(INDEX_NAME, limits.MANIFEST_BYTES), named_weights))
    for file_name, onnx_stages in stages_of_onnx.items():
        model = parse_onnx_model(bundle.read(file_name, limits.ONNX_BYTES), file_name)
        for stage, onnx, values in onnx_stages:
            tensors_of_file = read_headers((*stage.weights, *onnx.weights))
            raise_problems(check_onnx(model, stage, values, tensors_of_file, file_name))


def bundle_permissions(bundle: Bundle) -> set[str]:
    """Return what a caller must name in ``allow_ops`` to load a bundle. Reads its graphs."""
    return needed_permissions(map(bundle.graph, range(len(bundle.stages))))
