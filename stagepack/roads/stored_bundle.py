"""What a bundle stores, for another bundle that is made of it: graphs, tensors, the recorded example, files such as ``config.json``."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagepack.errors import OptionError
from stagepack.format.dtypes import TORCH_DTYPES
from stagepack.format.file_checks import FileVersion
from stagepack.format.file_writing import FileRange
from stagepack.format.graph import Graph, Weight
from stagepack.format.manifest import further_file_names
from stagepack.format.reader import Bundle
from stagepack.format.rules import raise_problems
from stagepack.format.validate.files import NamedWeights, check_example
from stagepack.format.weights import StoredTensor, TensorSpec, read_weight_header
from stagepack.format.writer import Pieces, TensorSource, check_output_path
from stagepack.partition.assignment import CutStage
from stagepack.roads.bundle_builder import BundleBuilder, EntryPointContent


def begin_rewriting(
    bundle: Bundle, out: str | os.PathLike[str], *, overwrite: bool
) -> tuple[BundleBuilder, dict[str, FileVersion]]:
    """Begin a bundle that is made of another one: check the output, and compare all files with their digests.

    The entry points are to be added. If `out` is the folder of `bundle`, only `bundle` may be replaced there.
    The result has the version of each file too: only these files may be copied.
    """
    check_is_written(bundle)
    check_output_path(out, overwrite=overwrite)
    is_same_folder = os.path.realpath(out) == os.path.realpath(bundle.path)
    versions = bundle.check_digests(bundle.files)
    builder = BundleBuilder(
        out=out,
        producer=bundle.manifest.producer,
        device=bundle.manifest.device,
        files={file_name: bundle.read(file_name) for file_name in further_file_names(bundle.manifest)},
        overwrite=overwrite,
        replaced_digest=bundle.digest if is_same_folder else None,
    )
    return builder, versions


def check_is_written(bundle: Bundle) -> None:
    """Refuse a bundle that is composed of deltas in memory."""
    if bundle.patches is not None:
        raise OptionError(f"{bundle.location}: is composed of deltas: write it first (stagepack apply)")


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
        """The stored tensors of its weights, with the weights of zeros, which no file stores."""
        return _stored_tensors(
            self.locations, self.versions, [weight for graph in self.graphs for weight in graph.weights]
        )

    @property
    def content(self) -> EntryPointContent:
        """What is written for the same entry point, with the same cut."""
        entry_point = self.bundle.entry_point
        stages = [
            CutStage(graph=graph, added_count=stage.added, node_runs=stage.places)
            for graph, stage in zip(self.graphs, entry_point.stages, strict=True)
        ]
        return EntryPointContent(entry_point=entry_point, stages=stages, record_example=lambda _: self.example)

    @property
    def example(self) -> TensorSource:
        """The tensors of the recorded example; none if the bundle has none."""
        path = self.bundle.example
        if path is None:
            return _stored_tensors({}, self.versions)
        header = read_weight_header(path)
        raise_problems(check_example(self.bundle.entry_point, header))
        return _stored_tensors({tensor: (path, stored) for tensor, stored in header.items()}, self.versions)


def read_entry_points(bundle: Bundle, versions: Mapping[str, FileVersion]) -> list[StoredEntryPoint]:
    """Read the graphs of all entry points, and the headers of their weight files."""
    bundle = bundle.with_graphs_kept()
    named_weights = NamedWeights()
    return [
        read_entry_point(bundle.select(entry_point.name), versions, named_weights)
        for entry_point in bundle.entry_points
    ]


def read_entry_point(
    bundle: Bundle, versions: Mapping[str, FileVersion] | None = None, named_weights: NamedWeights | None = None
) -> StoredEntryPoint:
    """Read the graphs of the selected entry point, and the headers of its weight files.

    named_weights: the weights of the entry points that are read with this one; None for an entry point alone.
    """
    bundle = bundle.stored
    graphs = bundle.graphs()
    locations: dict[str, tuple[Path, StoredTensor]] = {}
    named_weights = named_weights or NamedWeights()
    for stage_number, graph in enumerate(graphs):
        locations |= bundle.tensors(stage_number, graph, named_weights=named_weights)
    return StoredEntryPoint(bundle=bundle, graphs=graphs, locations=locations, versions=versions or {})


def _stored_tensors(
    locations: Mapping[str, tuple[Path, StoredTensor]],
    versions: Mapping[str, FileVersion],
    weights: Sequence[Weight] = (),
) -> TensorSource:
    """Return the tensors of weight files, and those `weights` that are zeros."""
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
