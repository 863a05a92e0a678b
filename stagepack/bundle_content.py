"""What a bundle stores, for another bundle that is made of it: tensors, the recorded example, files such as ``config.json``."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stagepack.bundle_writing import EntryPointContent
from stagepack.format.dtypes import TORCH_DTYPES
from stagepack.format.file_writing import FileRange, FileVersion
from stagepack.format.graph import Graph, Weight
from stagepack.format.reader import Bundle
from stagepack.format.tree import value_names
from stagepack.format.validate import INDEX_NAME, NamedWeights, check_example, raise_problems
from stagepack.format.weights import StoredTensor, TensorSpec, read_weight_header
from stagepack.format.writer import Pieces, TensorSource, check_output_path
from stagepack.partition.cut import Cut, CutStage


def check_output(bundle: Bundle, out: str | os.PathLike[str], *, overwrite: bool) -> str | None:
    """Refuse an output path that a bundle made of this one cannot be written to, before any work is done.

    The result is the digest of `bundle` if `out` is its folder, where only it may be replaced; otherwise None.
    """
    check_output_path(out, overwrite=overwrite)
    return bundle.digest if os.path.realpath(out) == os.path.realpath(bundle.path) else None


def further_files(bundle: Bundle) -> dict[str, bytes]:
    """Return the files of a bundle that depend neither on its cut nor on its weights, such as ``config.json``."""
    return {file_name: bundle.read(file_name) for file_name in further_file_names(bundle)}


def further_file_names(bundle: Bundle) -> list[str]:
    """Return the names of the files that `further_files` reads."""
    rewritten_files = {INDEX_NAME}
    for entry_point in bundle.entry_points:
        rewritten_files.add(entry_point.example or "")
        for stage in entry_point.stages:
            rewritten_files |= {stage.graph, *stage.weights, *stage.onnx_files}
    return [file_name for file_name in bundle.files if file_name not in rewritten_files]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntryPoint:
    """The graphs of an entry point of a bundle, and where the weights are stored.

    Attributes:
        bundle: the bundle, at this entry point.
        graphs: the graphs of its stages.
        locations: the file and the position of each stored tensor, by name.
        versions: the version of each file that was compared with its digest, by file name; only these files are copied.
    """

    bundle: Bundle
    graphs: tuple[Graph, ...]
    locations: Mapping[str, tuple[Path, StoredTensor]]
    versions: Mapping[str, FileVersion]

    @property
    def weights(self) -> TensorSource:
        """The stored tensors of its weights."""
        weights = [weight for graph in self.graphs for weight in graph.weights]
        return stored_tensors(self.locations, self.versions, weights)

    def content(self, **changes: Any) -> EntryPointContent:
        """Return what `write_bundle` writes for the same entry point, with the same cut."""
        entry_point = self.bundle.entry_point
        stages = [
            CutStage(graph=graph, added_count=stage.added, node_runs=stage.places)
            for graph, stage in zip(self.graphs, entry_point.stages, strict=True)
        ]
        unchanged = EntryPointContent(
            name=entry_point.name,
            signature=entry_point.signature,
            symbols=entry_point.symbols,
            guards=entry_point.guards,
            cut=Cut(
                stages=tuple(stages),
                edges=entry_point.edges,
                outputs=tuple(value_names(entry_point.signature.result)),
            ),
            plan=entry_point.plan,
            seed=entry_point.seed,
            record_example=lambda _: recorded_example(self.bundle, self.versions),
        )
        return replace(unchanged, **changes)


def read_entry_point(
    bundle: Bundle,
    versions: Mapping[str, FileVersion] = MappingProxyType({}),
    named_weights: NamedWeights | None = None,
) -> StoredEntryPoint:
    """Read the graphs of the selected entry point, and the headers of its weight files.

    named_weights: the weights of the entry points that are read with this one; None for an entry point alone.
    """
    graphs = bundle.graphs()
    locations: dict[str, tuple[Path, StoredTensor]] = {}
    named_weights = named_weights or NamedWeights()
    for stage_number, graph in enumerate(graphs):
        locations |= bundle.tensors(stage_number, graph, named_weights=named_weights)
    return StoredEntryPoint(bundle=bundle, graphs=graphs, locations=locations, versions=versions)


def recorded_example(bundle: Bundle, versions: Mapping[str, FileVersion]) -> TensorSource:
    """Return the tensors of the recorded example; none if the bundle has none."""
    if bundle.example is None:
        return stored_tensors({}, versions)
    header = read_weight_header(bundle.example)
    raise_problems(check_example(bundle.entry_point, header))
    return stored_tensors({tensor: (bundle.example, stored) for tensor, stored in header.items()}, versions)


def stored_tensors(
    locations: Mapping[str, tuple[Path, StoredTensor]],
    versions: Mapping[str, FileVersion],
    weights: Sequence[Weight] = (),
) -> TensorSource:
    """Return the tensors of weight files, and the weights of zeros, which no file stores."""
    specs = {
        tensor: TensorSpec(name=tensor, dtype=TORCH_DTYPES[stored.dtype], shape=stored.shape)
        for tensor, (_, stored) in locations.items()
    }
    for weight in weights:
        if weight.zeros:
            specs[weight.stored] = TensorSpec(name=weight.stored, dtype=weight.dtype, shape=weight.shape)

    def read(tensor: str) -> Pieces:
        path, stored = locations[tensor]
        return [FileRange(path=path, start=stored.start, size=stored.end - stored.start, version=versions[path.name])]

    return TensorSource(specs=specs, read=read)


def merged_tensors(sources: Sequence[TensorSource]) -> TensorSource:
    """Return the tensors of several sources. One that several of them have is the same in all."""
    source_of_tensor: dict[str, TensorSource] = {}
    for source in sources:
        for tensor in source.specs:
            source_of_tensor.setdefault(tensor, source)
    specs = {tensor: source.specs[tensor] for tensor, source in source_of_tensor.items()}
    return TensorSource(specs=specs, read=lambda tensor: source_of_tensor[tensor].read(tensor))
