"""Cuts, their signatures and the content of their weights -> a bundle on disk.

A stored tensor that one stage uses goes into the file of that stage. One that several stages use goes into a shared file; there is
one for each set of stages, so that a stage reads nothing that it does not use. In a bundle that transformers opens, the files of parameters
and persistent buffers have nothing else: it reports each tensor of a checkpoint that the model does not have.

- What a bundle stores, for another bundle that is made of it: tensors, the recorded example, files such as ``config.json``.
"""

# Long because the manifest, the graphs and the weights of a bundle are written in one pass.

import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from stagepack.format.chunks import ZERO_DIGEST
from stagepack.format.codec import encode_graph
from stagepack.format.dtypes import TORCH_DTYPES
from stagepack.format.file_writing import FileRange, FileVersion
from stagepack.format.graph import Graph, Weight
from stagepack.format.manifest import VERSION, EntryPoint, Manifest, Producer, Signature, Stage, signature_features
from stagepack.format.operators import ALLOWED_NAMESPACES, operator_namespace
from stagepack.format.plan import Plan, Run
from stagepack.format.reader import Bundle, check_stages
from stagepack.format.shapes import Guard, Symbol
from stagepack.format.tree import value_names
from stagepack.format.validate import (
    INDEX_NAME,
    MODEL_CONFIG_NAME,
    NamedWeights,
    check_example,
    check_graph,
    raise_problems,
)
from stagepack.format.weights import StoredTensor, TensorSpec, read_weight_header
from stagepack.format.writer import BundleWriter, Pieces, TensorSource, check_output_path
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.folding import fold_graph
from stagepack.partition.partitioner import Cut, CutStage
from stagepack.terminal import byte_progress

_EXAMPLE_FILE_NAME = "example.safetensors"
# In the name of a file of buffers that are not persistent, and of constants.
_CONSTANTS_SUFFIX = "-constants"
# Takes the bundle before it has its name and its examples, at the entry point, and returns the recorded example.
ExampleRecorder = Callable[[Bundle], TensorSource]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPointContent:
    """One entry point to be written.

    Attributes:
        name: its name in the bundle.
        signature: how it is called.
        symbols: the dynamic sizes.
        guards: the conditions on them.
        cut: its stages and edges.
        plan: how it is cut; None if that is not known.
        seed: the seed of the random numbers of the example.
        record_example: returns the recorded example, which may be empty. It is called when all else is written, and may raise an error:
            then nothing is written.
    """

    name: str
    signature: Signature
    symbols: tuple[Symbol, ...]
    guards: tuple[Guard, ...]
    cut: Cut
    plan: Plan | None
    seed: int
    record_example: ExampleRecorder


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOrigin:
    """The fields of a manifest that describe the whole model.

    Attributes:
        producer: the versions of stagepack and torch that captured the model.
        device: the type of the device that the model was captured on.
        files: further files of the bundle by name, such as ``config.json``.
    """

    producer: Producer
    device: str
    files: Mapping[str, bytes] = field(default_factory=dict)


def write_bundle(
    out: str | os.PathLike[str],
    entry_points: Sequence[EntryPointContent],
    weights: TensorSource,
    origin: ModelOrigin,
    *,
    overwrite: bool,
    replaced_digest: str | None = None,
) -> None:
    """Write a bundle, completely or not at all.

    replaced_digest: replace only the bundle with this digest; None for any bundle.
    """
    prefixes = [f"{entry_point.name}-" if len(entry_points) > 1 else "" for entry_point in entry_points]
    stages = {
        f"{prefix}stage-{stage_number}": stage
        for prefix, entry_point in zip(prefixes, entry_points, strict=True)
        for stage_number, stage in enumerate(entry_point.cut.stages)
    }
    checkpoint_names = _checkpoint_names(stages.values())
    is_checkpoint = MODEL_CONFIG_NAME in origin.files
    file_of_tensor = _assign_files(stages, checkpoint_names if is_checkpoint else None)
    weight_bytes = sum(weights.specs[tensor].nbytes for tensor in file_of_tensor)
    with (
        BundleWriter(out, overwrite=overwrite) as writer,
        byte_progress(f"writing {Path(out).name}", weight_bytes) as progress,
    ):
        stage_entries = _write_graphs(writer, stages, file_of_tensor, weights)
        for file_name in dict.fromkeys(file_of_tensor.values()):
            specs = [
                weights.specs[tensor] for tensor, tensor_file in file_of_tensor.items() if tensor_file == file_name
            ]
            writer.write_tensors(file_name, specs, weights.read, progress)
        remaining_entries = iter(stage_entries)
        written_entry_points = [
            _manifest_entry_point(entry_point, tuple(itertools.islice(remaining_entries, len(entry_point.cut.stages))))
            for entry_point in entry_points
        ]
        signatures = [entry_point.signature for entry_point in entry_points]
        calls = (call for stage in stages.values() for call in stage.graph.calls)
        signatures += [call.signature for call in calls if call.signature is not None]
        manifest = _manifest(written_entry_points, origin, signature_features(signatures))
        writer.write_draft(manifest)
        example_files = _write_examples(writer, prefixes, entry_points)
        index_files = _checkpoint_index(checkpoint_names, file_of_tensor, weights)
        for file_name, content in {**origin.files, **index_files}.items():
            writer.write_file(file_name, [content])
        manifest = msgspec.structs.replace(
            manifest, entry_points=tuple(map(_with_example, written_entry_points, example_files))
        )
        writer.write_draft(manifest)
        check_stages(Bundle(writer.folder))
        writer.finish(manifest, replaced_digest=replaced_digest)


def _write_examples(
    writer: BundleWriter, prefixes: Sequence[str], entry_points: Sequence[EntryPointContent]
) -> list[str | None]:
    """Let each entry point record its example; return the names of the files."""
    draft = Bundle(writer.folder)
    file_names: list[str | None] = []
    for prefix, entry_point in zip(prefixes, entry_points, strict=True):
        example = entry_point.record_example(draft.select(entry_point.name))
        file_names.append(f"{prefix}{_EXAMPLE_FILE_NAME}" if example.specs else None)
        if example.specs:
            writer.write_tensors(f"{prefix}{_EXAMPLE_FILE_NAME}", example.specs.values(), example.read)
    return file_names


def _with_example(entry_point: EntryPoint, file_name: str | None) -> EntryPoint:
    return msgspec.structs.replace(entry_point, example=file_name)


def _write_graphs(
    writer: BundleWriter, stages: Mapping[str, CutStage], file_of_tensor: Mapping[str, str], weights: TensorSource
) -> list[Stage]:
    """Write the graphs of stages, by the names of the stages; return their entries in the manifest."""
    entries = []
    # Entry points that were read from the same files have the same graphs.
    encoded_graphs: dict[tuple[int, tuple[Run, ...], int], tuple[Stage, bytes]] = {}
    for stage_name, stage in stages.items():
        key = (id(stage.graph), stage.node_runs, stage.added_count)
        if key not in encoded_graphs:
            derived = _stage_entry(stage, weights)
            raise_problems(check_graph(stage.graph, f"{stage_name}.msgpack"))
            encoded_graphs[key] = derived, encode_graph(fold_graph(stage.graph, derived.node_numbers))
        derived, encoded = encoded_graphs[key]
        entries.append(_with_files(derived, stage_name, stage.graph, file_of_tensor))
        writer.write_file(entries[-1].graph, [encoded])
    return entries


def _manifest(entry_points: Sequence[EntryPoint], origin: ModelOrigin, features: tuple[str, ...]) -> Manifest:
    """The manifest, without its list of files and its digest, which the writer adds."""
    return Manifest(
        format="stagepack",
        version=VERSION,
        producer=origin.producer,
        entry_points=tuple(entry_points),
        files=(),
        sha256=ZERO_DIGEST,
        device=origin.device,
        features=features,
    )


def _manifest_entry_point(entry_point: EntryPointContent, stages: tuple[Stage, ...]) -> EntryPoint:
    """The entry point in the manifest, without its example."""
    return EntryPoint(
        name=entry_point.name,
        signature=entry_point.signature,
        stages=stages,
        edges=entry_point.cut.edges,
        plan=entry_point.plan,
        symbols=entry_point.symbols,
        guards=entry_point.guards,
        seed=entry_point.seed,
    )


def _tensors_in_files(graph: Graph) -> dict[str, None]:
    """The stored tensors of a graph that have bytes in a file, in the order of its weights."""
    return dict.fromkeys(weight.stored for weight in graph.weights if not weight.zeros)


def _checkpoint_names(stages: Iterable[CutStage]) -> set[str]:
    """The stored tensors that a checkpoint of the model has: its parameters and persistent buffers."""
    return {
        weight.stored
        for stage in stages
        for weight in stage.graph.weights
        if weight.base is None and weight.kind in ("parameter", "buffer")
    }


def _assign_files(stages: Mapping[str, CutStage], separate_names: Collection[str] | None) -> dict[str, str]:
    """Return the file name of each stored tensor, in the order of first use. `separate_names` share no file with others."""
    stages_of_tensor: dict[str, list[str]] = {}
    for stage_name, stage in stages.items():
        for tensor in _tensors_in_files(stage.graph):
            stages_of_tensor.setdefault(tensor, []).append(stage_name)
    shared_files: dict[tuple[bool, *tuple[str, ...]], str] = {}
    file_of_tensor = {}
    for tensor, stage_names in stages_of_tensor.items():
        is_apart = separate_names is not None and tensor not in separate_names
        if len(stage_names) == 1:
            file_of_tensor[tensor] = f"{stage_names[0]}{_CONSTANTS_SUFFIX if is_apart else ''}.safetensors"
        else:
            next_name = f"shared-{len(shared_files)}.safetensors"
            file_of_tensor[tensor] = shared_files.setdefault((is_apart, *stage_names), next_name)
    return file_of_tensor


def _with_files(entry: Stage, stage_name: str, graph: Graph, file_of_tensor: Mapping[str, str]) -> Stage:
    """The entry of a stage in the manifest with the names of its files."""
    weight_files = {file_of_tensor[tensor] for tensor in _tensors_in_files(graph)}
    own_name = f"{stage_name}.safetensors"
    ordered = sorted(weight_files, key=lambda file_name: (file_name != own_name, file_name))  # its own file first
    return msgspec.structs.replace(entry, graph=f"{stage_name}.msgpack", weights=tuple(ordered))


def _stage_entry(stage: CutStage, weights: TensorSource) -> Stage:
    """The entry of a stage in the manifest without the names of its files."""
    graph = stage.graph
    stored_tensors = {weight.stored for weight in graph.weights}
    return Stage(
        graph="",
        inputs=tuple(value.name for value in graph.inputs),
        outputs=graph.outputs,
        nodes=len(graph.nodes),
        weight_bytes=sum(weights.specs[tensor].nbytes for tensor in stored_tensors),
        flops=sum(node.cost.flops for node in graph.nodes),
        namespaces=tuple(sorted({operator_namespace(op.name) for op in graph.ops} - ALLOWED_NAMESPACES)),
        state=GraphAnalysis(graph).written_weight_names,
        added=stage.added_count,
        places=stage.node_runs,
    )


def _checkpoint_index(
    checkpoint_names: Collection[str], file_of_tensor: Mapping[str, str], weights: TensorSource
) -> dict[str, bytes]:
    """The index file that makes a bundle a sharded checkpoint: the files of the parameters and persistent buffers."""
    weight_map = {
        tensor: file_name for tensor, file_name in sorted(file_of_tensor.items()) if tensor in checkpoint_names
    }
    if not weight_map:
        return {}
    total_size = sum(weights.specs[tensor].nbytes for tensor in weight_map)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    return {INDEX_NAME: json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"}


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
