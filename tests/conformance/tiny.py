"""The bundle of ``schema/vectors/bundle``, made by code: a linear layer in stage 0, a relu in stage 1."""

import struct
from pathlib import Path

from stagepack.format.folded_graph import trivially_folded
from stagepack.format.graph import Graph, Node, Op, Scope, Value, ValueArg, Weight
from stagepack.format.graph_codec import encode_graph
from stagepack.format.manifest import Edge, EntryPoint, Manifest, Producer, Stage
from stagepack.format.manifest_codec import ZERO_DIGEST
from stagepack.format.shapes import Symbol
from stagepack.format.tree import Parameter, SequenceTree, Signature, ValueLeaf
from stagepack.format.weights import TensorSpec
from stagepack.format.writer import BundleWriter

BATCH = Symbol(name="batch", min=1, max=64, example=2)
LINEAR = Op(
    name="aten.linear.default",
    schema="aten::linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
    parameters=("input", "weight", "bias"),
)
RELU = Op(name="aten.relu.default", schema="aten::relu(Tensor self) -> Tensor", parameters=("self",))
X = Value(name="x", dtype="float32", shape=("batch", 2))
HIDDEN = Value(name="hidden", dtype="float32", shape=("batch", 3))
RESULT = Value(name="result", dtype="float32", shape=("batch", 3))

STAGES = (
    Graph(
        symbols=(BATCH,),
        inputs=(X,),
        weights=(
            Weight(
                value="w0", names=("layer.weight",), kind="parameter", dtype="float32", shape=(3, 2), trainable=True
            ),
            Weight(value="w1", names=("layer.bias",), kind="parameter", dtype="float32", shape=(3,), trainable=True),
        ),
        nodes=(Node(op=0, args=(ValueArg("x"), ValueArg("w0"), ValueArg("w1")), outputs=(HIDDEN,)),),
        outputs=("hidden",),
        ops=(LINEAR,),
        scopes=(Scope(path="layer", type="torch.nn.modules.linear.Linear"),),
    ),
    Graph(
        symbols=(BATCH,),
        inputs=(HIDDEN,),
        nodes=(Node(op=0, args=(ValueArg("hidden"),), outputs=(RESULT,)),),
        outputs=("result",),
        ops=(RELU,),
        scopes=(Scope(path=""),),
    ),
)
TENSORS = {
    "layer.weight": (TensorSpec(name="layer.weight", dtype="float32", shape=(3, 2)), (1, 2, 3, 4, 5, 6)),
    "layer.bias": (TensorSpec(name="layer.bias", dtype="float32", shape=(3,)), (0, -1, 1)),
}


def write(out: Path) -> None:
    """Write the bundle."""
    with BundleWriter(out, overwrite=False) as writer:
        for number, graph in enumerate(STAGES):
            writer.write_file(f"stage-{number}.msgpack", [encode_graph(trivially_folded(graph))])
        writer.write_tensors(
            "stage-0.safetensors",
            [spec for spec, _ in TENSORS.values()],
            lambda name: [struct.pack(f"<{len(TENSORS[name][1])}f", *TENSORS[name][1])],
        )
        writer.finish(_manifest())


def _manifest() -> Manifest:
    ends = ((X, None, (0,)), (HIDDEN, 0, (1,)), (RESULT, 1, ()))
    forward = EntryPoint(
        name="forward",
        signature=Signature(
            parameters=(Parameter(name="x", tree=ValueLeaf("x"), positional=True),),
            result=SequenceTree(kind="tuple", items=(ValueLeaf("result"),)),
        ),
        stages=(
            Stage(
                graph="stage-0.msgpack",
                weights=("stage-0.safetensors",),
                inputs=("x",),
                outputs=("hidden",),
                nodes=1,
                weight_bytes=36,
            ),
            Stage(graph="stage-1.msgpack", inputs=("hidden",), outputs=("result",), nodes=1),
        ),
        edges=tuple(
            Edge(name=value.name, dtype=value.dtype, shape=value.shape, producer=producer, consumers=consumers)
            for value, producer, consumers in ends
        ),
        symbols=(BATCH,),
    )
    return Manifest(
        format="stagepack",
        version="1.0",
        producer=Producer(stagepack="0.1.0", torch="2.13.0"),
        entry_points=(forward,),
        files=(),
        device="cpu",
        sha256=ZERO_DIGEST,
    )
