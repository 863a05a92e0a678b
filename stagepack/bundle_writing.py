"""A cut, its signature and the bytes of its weights -> a bundle on disk.

A stored tensor that one stage uses lies in that stage's file; one that several use lies in a shared file, one for
each set of stages, so that a stage reads nothing it does not use.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from stagepack.format.codec import encode_graph
from stagepack.format.digest import ZERO_DIGEST
from stagepack.format.manifest import Manifest, Producer, Stage
from stagepack.format.operators import ALLOWED_NAMESPACES, operator_namespace
from stagepack.format.plan import Plan
from stagepack.format.reader import EXAMPLE_FILE_NAME
from stagepack.format.shapes import Symbol
from stagepack.format.signature import Signature
from stagepack.format.validate import check_graph, raise_problems
from stagepack.format.version import VERSION
from stagepack.format.writer import BundleWriter, TensorSource
from stagepack.graph.aliasing import written_weight_names
from stagepack.graph.folding import fold_graph
from stagepack.partition.cut import Cut, CutStage

INDEX_FILE_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOrigin:
    """What a bundle says of the model besides its stages.

    Attributes:
        plan: how the model is cut.
        device: the type of the device that it was captured on.
        files: further files to keep, by name, such as ``config.json``.
    """

    signature: Signature
    symbols: tuple[Symbol, ...]
    producer: Producer
    plan: Plan
    device: str
    seed: int = 0
    files: Mapping[str, bytes] = field(default_factory=dict)


def write_bundle(
    out: str | os.PathLike[str],
    cut: Cut,
    weights: TensorSource,
    example: TensorSource,
    origin: ModelOrigin,
    *,
    overwrite: bool,
) -> None:
    """Write a bundle to `out`, whole or not at all.

    Raises:
        FormatError: the cut breaks rules of the format, so nothing is written.
        OutputExistsError: `out` exists, and is not to be or cannot be overwritten.
        WriteError: the disk is full or the like.
    """
    stored = [
        dict.fromkeys(weight.stored for weight in stage.graph.weights if not weight.zeros) for stage in cut.stages
    ]
    users: dict[str, list[int]] = {}
    for number, names in enumerate(stored):
        for name in names:
            users.setdefault(name, []).append(number)
    placed = _place(users)
    with BundleWriter(out, overwrite=overwrite) as writer:
        stages = []
        for number, stage in enumerate(cut.stages):
            name, graph = f"stage-{number}.msgpack", stage.graph
            raise_problems(check_graph(graph, name))
            files = dict.fromkeys(
                sorted(
                    (placed[tensor] for tensor in stored[number]), key=lambda file: (file.startswith("shared"), file)
                )
            )
            entry = _entry(stage, name, tuple(files), weights)
            writer.write_file(name, [encode_graph(fold_graph(graph, entry.node_numbers))])
            stages.append(entry)
        for file in dict.fromkeys(placed.values()):
            writer.write_tensors(file, (weights.specs[name] for name in placed if placed[name] == file), weights.read)
        if example.specs:
            writer.write_tensors(EXAMPLE_FILE_NAME, example.specs.values(), example.read)
        index = _index(cut, placed, weights)
        for name, content in {**origin.files, **index}.items():
            writer.write_file(name, [content])
        writer.finish(
            Manifest(
                format="stagepack",
                version=VERSION,
                producer=origin.producer,
                signature=origin.signature,
                stages=tuple(stages),
                edges=cut.edges,
                files=(),
                sha256=ZERO_DIGEST,
                device=origin.device,
                plan=origin.plan,
                symbols=origin.symbols,
                seed=origin.seed,
            )
        )


def _place(users: Mapping[str, list[int]]) -> dict[str, str]:
    """Each stored tensor -> the file that it goes into, in the order of first use."""
    shared: dict[tuple[int, ...], str] = {}
    placed = {}
    for name, stages in users.items():
        if len(stages) == 1:
            placed[name] = f"stage-{stages[0]}.safetensors"
        else:
            placed[name] = shared.setdefault(tuple(stages), f"shared-{len(shared)}.safetensors")
    return placed


def _entry(stage: CutStage, name: str, files: tuple[str, ...], weights: TensorSource) -> Stage:
    graph = stage.graph
    held = dict.fromkeys(weight.stored for weight in graph.weights)
    return Stage(
        graph=name,
        weights=files,
        inputs=tuple(value.name for value in graph.inputs),
        outputs=graph.outputs,
        nodes=len(graph.nodes),
        weight_bytes=sum(weights.specs[name].nbytes for name in held),
        flops=sum(node.cost.flops for node in graph.nodes),
        namespaces=tuple(sorted({operator_namespace(op.name) for op in graph.ops} - ALLOWED_NAMESPACES)),
        state=written_weight_names(graph),
        added=stage.added,
        places=stage.places,
    )


def _index(cut: Cut, placed: Mapping[str, str], weights: TensorSource) -> dict[str, bytes]:
    """The index that makes a bundle a plain sharded checkpoint: the parameters and persistent buffers, and their files."""
    kinds = {
        weight.stored: weight.kind for stage in cut.stages for weight in stage.graph.weights if weight.base is None
    }
    listed = {name: file for name, file in placed.items() if kinds.get(name) in ("parameter", "buffer")}
    if not listed:
        return {}
    total = sum(weights.specs[name].nbytes for name in listed)
    text = json.dumps(
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(listed.items()))}, indent=2, ensure_ascii=False
    )
    return {INDEX_FILE_NAME: text.encode() + b"\n"}
