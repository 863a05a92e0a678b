"""Cuts, their signatures and the content of their weights -> a bundle on disk.

A stored tensor that one stage uses goes into the file of that stage. One that several stages use goes into a shared file; there is
one for each set of stages, so that a stage reads nothing that it does not use. In a bundle that transformers opens, the files of parameters
and persistent buffers have nothing else: it reports each tensor of a checkpoint that the model does not have.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from stagepack.format.graph import Graph
from stagepack.format.graph_codec import encode_graph
from stagepack.format.manifest import VERSION, EntryPoint, Manifest, Producer, Stage
from stagepack.format.manifest_codec import ZERO_DIGEST
from stagepack.format.operators import ALLOWED_NAMESPACES, operator_namespace
from stagepack.format.reader import Bundle, check_all_stages
from stagepack.format.rules import INDEX_NAME, MODEL_CONFIG_NAME, raise_problems
from stagepack.format.tree import signature_features
from stagepack.format.validate.graph_rules import check_graph
from stagepack.format.weights import TensorSpec
from stagepack.format.writer import BundleWriter, Pieces, TensorSource
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.folding import fold_graph
from stagepack.partition.assignment import CutStage
from stagepack.terminal import byte_progress

_EXAMPLE_FILE_NAME = "example.safetensors"
# In the name of a file of buffers that are not persistent, and of constants.
_CONSTANTS_SUFFIX = "-constants"


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPointContent:
    """One entry point to be written.

    Attributes:
        entry_point: its entry in the manifest, whose stages and example are found out when it is written.
        stages: the stages of its cut.
        record_example: returns the recorded example, which may be empty. It takes the bundle at the entry point when all else is written,
            but has no name yet, and may raise an error: then nothing is written.
    """

    entry_point: EntryPoint
    stages: Sequence[CutStage]
    record_example: Callable[[Bundle], TensorSource]


@dataclass(slots=True, kw_only=True)
class BundleBuilder:
    """A bundle to be written: entry points with their weights, which are added, and what describes the whole model.

    Attributes:
        out: the folder to write.
        producer: the versions of stagepack and torch that captured the model.
        device: the type of the device that the model was captured on.
        files: further files of the bundle by name, such as ``config.json``.
        overwrite: replace a bundle at `out`.
        replaced_digest: replace only the bundle with this digest; None for any bundle.
    """

    out: str | os.PathLike[str]
    producer: Producer
    device: str
    files: Mapping[str, bytes]
    overwrite: bool = False
    replaced_digest: str | None = None
    _contents: list[EntryPointContent] = field(init=False, default_factory=list)
    _source_of_tensor: dict[str, TensorSource] = field(init=False, default_factory=dict)

    def add(self, content: EntryPointContent, weights: TensorSource) -> None:
        """Add an entry point. A stored tensor that several entry points have is the same in all."""
        self._contents.append(content)
        for tensor in weights.specs:
            self._source_of_tensor.setdefault(tensor, weights)

    def write(self) -> Bundle:
        """Write the bundle, completely or not at all, and open it."""
        stages = {
            f"{self._prefix(content)}stage-{stage_number}": stage
            for content in self._contents
            for stage_number, stage in enumerate(content.stages)
        }
        checkpoint_names = _checkpoint_names(stages)
        separate_names = checkpoint_names if MODEL_CONFIG_NAME in self.files else None
        file_of_tensor = _assign_files(stages, separate_names)
        with BundleWriter(self.out, overwrite=self.overwrite) as writer:
            stage_entries = self._write_graphs(writer, stages, file_of_tensor)
            self._write_weights(writer, file_of_tensor)
            manifest = self._manifest(stages, stage_entries)
            writer.write_draft(manifest)
            manifest = replace(manifest, entry_points=self._write_examples(writer, manifest))
            index_files = self._checkpoint_index(checkpoint_names, file_of_tensor)
            for file_name, content in {**self.files, **index_files}.items():
                writer.write_file(file_name, [content])
            writer.write_draft(manifest)
            check_all_stages(Bundle(writer.folder))
            writer.finish(manifest, replaced_digest=self.replaced_digest)
        return Bundle(self.out)

    def _prefix(self, content: EntryPointContent) -> str:
        return f"{content.entry_point.name}-" if len(self._contents) > 1 else ""

    def _spec(self, tensor: str) -> TensorSpec:
        return self._source_of_tensor[tensor].specs[tensor]

    def _read(self, tensor: str) -> Pieces:
        return self._source_of_tensor[tensor].read(tensor)

    def _write_graphs(
        self, writer: BundleWriter, stages: Mapping[str, CutStage], file_of_tensor: Mapping[str, str]
    ) -> dict[str, Stage]:
        """Write the graphs of stages; return their entries in the manifest. Both by the names of the stages."""
        entries = {}
        # Entry points that were read from the same files have the same graphs.
        encoded_graphs: dict[tuple[object, ...], tuple[Stage, bytes]] = {}
        for stage_name, stage in stages.items():
            key = (id(stage.graph), stage.node_runs, stage.added_count)
            if key not in encoded_graphs:
                derived = self._stage_entry(stage)
                raise_problems(check_graph(stage.graph, f"{stage_name}.msgpack"))
                encoded_graphs[key] = derived, encode_graph(fold_graph(stage.graph, derived.node_numbers))
            derived, encoded = encoded_graphs[key]
            entries[stage_name] = _with_files(derived, stage_name, stage.graph, file_of_tensor)
            writer.write_file(entries[stage_name].graph, [encoded])
        return entries

    def _stage_entry(self, stage: CutStage) -> Stage:
        """The entry of a stage in the manifest without the names of its files."""
        graph = stage.graph
        stored_tensors = {weight.stored for weight in graph.weights}
        return Stage(
            graph="",
            inputs=tuple(value.name for value in graph.inputs),
            outputs=graph.outputs,
            nodes=len(graph.nodes),
            weight_bytes=sum(self._spec(tensor).nbytes for tensor in stored_tensors),
            flops=sum(node.cost.flops for node in graph.nodes),
            namespaces=tuple(sorted({operator_namespace(op.name) for op in graph.ops} - ALLOWED_NAMESPACES)),
            state=GraphAnalysis(graph).written_weight_names,
            added=stage.added_count,
            places=stage.node_runs,
        )

    def _write_weights(self, writer: BundleWriter, file_of_tensor: Mapping[str, str]) -> None:
        tensors_of_file: dict[str, list[TensorSpec]] = {}
        for tensor, file_name in file_of_tensor.items():
            tensors_of_file.setdefault(file_name, []).append(self._spec(tensor))
        total_bytes = sum(spec.nbytes for specs in tensors_of_file.values() for spec in specs)
        with byte_progress(f"writing {Path(self.out).name}", total_bytes) as progress:
            for file_name, specs in tensors_of_file.items():
                writer.write_tensors(file_name, specs, self._read, progress)

    def _manifest(self, stages: Mapping[str, CutStage], stage_entries: Mapping[str, Stage]) -> Manifest:
        """The manifest without the examples, and without its list of files and its digest, which the writer adds."""
        remaining_entries = iter(stage_entries.values())
        entry_points = [
            replace(content.entry_point, stages=tuple(next(remaining_entries) for _ in content.stages), example=None)
            for content in self._contents
        ]
        signatures = [entry_point.signature for entry_point in entry_points]
        calls = (call for stage in stages.values() for call in stage.graph.calls)
        signatures += [call.signature for call in calls if call.signature is not None]
        return Manifest(
            format="stagepack",
            version=VERSION,
            producer=self.producer,
            entry_points=tuple(entry_points),
            files=(),
            sha256=ZERO_DIGEST,
            device=self.device,
            features=signature_features(signatures),
        )

    def _write_examples(self, writer: BundleWriter, manifest: Manifest) -> tuple[EntryPoint, ...]:
        """Let each entry point record its example; return the entry points with the names of the files."""
        draft = Bundle(writer.folder)
        entry_points = []
        for content, entry_point in zip(self._contents, manifest.entry_points, strict=True):
            example = content.record_example(draft.select(entry_point.name))
            file_name = f"{self._prefix(content)}{_EXAMPLE_FILE_NAME}" if example.specs else None
            if file_name is not None:
                writer.write_tensors(file_name, example.specs.values(), example.read)
            entry_points.append(replace(entry_point, example=file_name))
        return tuple(entry_points)

    def _checkpoint_index(self, checkpoint_names: set[str], file_of_tensor: Mapping[str, str]) -> dict[str, bytes]:
        """The index file that makes a bundle a sharded checkpoint: the files of the parameters and persistent buffers."""
        weight_map = {
            tensor: file_name for tensor, file_name in sorted(file_of_tensor.items()) if tensor in checkpoint_names
        }
        if not weight_map:
            return {}
        total_size = sum(self._spec(tensor).nbytes for tensor in weight_map)
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        return {INDEX_NAME: json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"}


def _tensors_in_files(graph: Graph) -> dict[str, None]:
    """The stored tensors of a graph that have bytes in a file, in the order of its weights."""
    return dict.fromkeys(weight.stored for weight in graph.weights if not weight.zeros)


def _checkpoint_names(stages: Mapping[str, CutStage]) -> set[str]:
    """The stored tensors that a checkpoint of the model has: its parameters and persistent buffers."""
    return {
        weight.stored
        for stage in stages.values()
        for weight in stage.graph.weights
        if weight.base is None and weight.kind in ("parameter", "buffer")
    }


def _assign_files(stages: Mapping[str, CutStage], separate_names: set[str] | None) -> dict[str, str]:
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
    return replace(entry, graph=f"{stage_name}.msgpack", weights=tuple(ordered))
