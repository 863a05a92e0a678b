"""A cut, its signature and the content of its weights -> a bundle on disk.

A stored tensor that one stage uses goes into the file of that stage. One that several stages use goes into a shared file; there is
one for each set of stages, so that a stage reads nothing that it does not use.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stagepack.format.codec import encode_graph
from stagepack.format.digest import ZERO_DIGEST
from stagepack.format.graph import Graph
from stagepack.format.manifest import Manifest, Producer, Stage
from stagepack.format.operators import ALLOWED_NAMESPACES, operator_namespace
from stagepack.format.plan import Plan
from stagepack.format.reader import EXAMPLE_FILE_NAME
from stagepack.format.shapes import Symbol
from stagepack.format.signature import Signature
from stagepack.format.validate import check_graph, raise_problems
from stagepack.format.version import VERSION
from stagepack.format.weights import StoredTensor, tensor_layout
from stagepack.format.writer import BundleWriter, TensorSource
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.folding import fold_graph
from stagepack.partition.cut import Cut, CutStage

INDEX_FILE_NAME = "model.safetensors.index.json"

# Takes the file and the position of each stored tensor, by name, and returns the recorded example.
ExampleRecorder = Callable[[Mapping[str, tuple[Path, StoredTensor]]], TensorSource]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOrigin:
    """The fields of a manifest that describe the whole model.

    Attributes:
        signature: how the model is called.
        symbols: the dynamic sizes.
        producer: the versions of stagepack and torch that captured the model.
        plan: how the model is cut; None if that is not known.
        device: the type of the device that the model was captured on.
        seed: the seed of the random numbers of the example.
        files: further files of the bundle by name, such as ``config.json``.
    """

    signature: Signature
    symbols: tuple[Symbol, ...]
    producer: Producer
    plan: Plan | None
    device: str
    seed: int = 0
    files: Mapping[str, bytes] = field(default_factory=dict)


def write_bundle(
    out: str | os.PathLike[str],
    cut: Cut,
    weights: TensorSource,
    record_example: ExampleRecorder,
    origin: ModelOrigin,
    *,
    overwrite: bool,
) -> None:
    """Write a bundle, completely or not at all.

    Args:
        out: the folder to write.
        cut: the stages and edges.
        weights: the stored tensors of the stages' weights.
        record_example: returns the recorded example, which may be empty. It is called when the weights are written.
        origin: the fields of the manifest that describe the whole model.
        overwrite: replace a bundle that exists at `out`.

    Raises:
        FormatError: the cut breaks rules of the format; nothing is written.
        OutputExistsError: `out` exists and `overwrite` is false, or it is not a bundle.
        WriteError: the bundle cannot be written.
    """
    file_of_tensor = _assign_files(cut)
    with BundleWriter(out, overwrite=overwrite) as writer:
        stages = []
        for stage_number, stage in enumerate(cut.stages):
            graph_file = f"stage-{stage_number}.msgpack"
            raise_problems(check_graph(stage.graph, graph_file))
            entry = _stage_entry(graph_file, stage, file_of_tensor, weights)
            writer.write_file(graph_file, [encode_graph(fold_graph(stage.graph, entry.node_numbers))])
            stages.append(entry)
        locations: dict[str, tuple[Path, StoredTensor]] = {}
        for file_name in dict.fromkeys(file_of_tensor.values()):
            specs = [
                weights.specs[tensor] for tensor, tensor_file in file_of_tensor.items() if tensor_file == file_name
            ]
            writer.write_tensors(file_name, specs, weights.read)
            locations |= {stored.name: (writer.folder / file_name, stored) for stored in tensor_layout(specs)}
        example = record_example(locations)
        if example.specs:
            writer.write_tensors(EXAMPLE_FILE_NAME, example.specs.values(), example.read)
        for file_name, content in {**origin.files, **_checkpoint_index(cut, file_of_tensor, weights)}.items():
            writer.write_file(file_name, [content])
        writer.finish(_manifest(cut, tuple(stages), origin))


def _manifest(cut: Cut, stages: tuple[Stage, ...], origin: ModelOrigin) -> Manifest:
    """The manifest, without its list of files and its digest, which the writer adds."""
    return Manifest(
        format="stagepack",
        version=VERSION,
        producer=origin.producer,
        signature=origin.signature,
        stages=stages,
        edges=cut.edges,
        files=(),
        sha256=ZERO_DIGEST,
        device=origin.device,
        plan=origin.plan,
        symbols=origin.symbols,
        seed=origin.seed,
    )


def _tensors_in_files(graph: Graph) -> dict[str, None]:
    """The stored tensors of a graph that have bytes in a file, in the order of its weights."""
    return dict.fromkeys(weight.stored for weight in graph.weights if not weight.zeros)


def _assign_files(cut: Cut) -> dict[str, str]:
    """Return the file name of each stored tensor, in the order of first use."""
    stages_of_tensor: dict[str, list[int]] = {}
    for stage_number, stage in enumerate(cut.stages):
        for tensor in _tensors_in_files(stage.graph):
            stages_of_tensor.setdefault(tensor, []).append(stage_number)
    shared_files: dict[tuple[int, ...], str] = {}
    file_of_tensor = {}
    for tensor, stage_numbers in stages_of_tensor.items():
        if len(stage_numbers) == 1:
            file_of_tensor[tensor] = f"stage-{stage_numbers[0]}.safetensors"
        else:
            next_name = f"shared-{len(shared_files)}.safetensors"
            file_of_tensor[tensor] = shared_files.setdefault(tuple(stage_numbers), next_name)
    return file_of_tensor


def _stage_entry(graph_file: str, stage: CutStage, file_of_tensor: Mapping[str, str], weights: TensorSource) -> Stage:
    """The entry of a stage in the manifest."""
    graph = stage.graph
    weight_files = {file_of_tensor[tensor] for tensor in _tensors_in_files(graph)}
    stored_tensors = {weight.stored for weight in graph.weights}
    return Stage(
        graph=graph_file,
        # The stage's own file first.
        weights=tuple(sorted(weight_files, key=lambda file_name: (file_name.startswith("shared"), file_name))),
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


def _checkpoint_index(cut: Cut, file_of_tensor: Mapping[str, str], weights: TensorSource) -> dict[str, bytes]:
    """The index file that makes a bundle a sharded checkpoint: the files of the parameters and persistent buffers."""
    kind_of_tensor = {
        weight.stored: weight.kind for stage in cut.stages for weight in stage.graph.weights if weight.base is None
    }
    weight_map = {
        tensor: file_name
        for tensor, file_name in sorted(file_of_tensor.items())
        if kind_of_tensor.get(tensor) in ("parameter", "buffer")
    }
    if not weight_map:
        return {}
    total_size = sum(weights.specs[tensor].nbytes for tensor in weight_map)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    return {INDEX_FILE_NAME: json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"}
