"""The manifest: the root of a bundle, `manifest.json` (SPEC M1 to M13, O1)."""

from msgspec import Struct

from stagepack.format.limits import Int64
from stagepack.format.plan import Plan, Run, run_members
from stagepack.format.shapes import Dim, Symbol
from stagepack.format.signature import Signature


class Producer(Struct, frozen=True, kw_only=True):
    """The versions that made the bundle, for people who look for a cause; no reader decides by it."""

    stagepack: str
    torch: str


class Edge(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A value that crosses a boundary: into the model, between stages, or out of the model.

    Attributes:
        producer: the stage that makes it; None for an input of the model.
        consumers: the stages that use it, in order; empty when only the caller does, or nobody.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...] = ()
    expr: Dim | None = None
    producer: Int64 | None = None
    consumers: tuple[Int64, ...] = ()


class Onnx(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stage as an ONNX model.

    Attributes:
        model: the name of the ONNX file.
        weights: the names of the weight files with tensors that it alone uses.
    """

    model: str
    weights: tuple[str, ...] = ()


class Stage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stage: its files, the edges in and out, and facts for whoever places it.

    Attributes:
        graph: the name of its graph file.
        weights: the names of the weight files it reads; its own first.
        nodes: the number of nodes of its graph.
        weight_bytes: bytes of the weights that it uses, each stored tensor once.
        flops: floating-point operations of one call at the sizes of the example.
        namespaces: namespaces of operators that the caller must allow, beyond ATen and the like.
        state: names of the buffers that it writes.
        added: how many nodes, at the begin of its graph, stand in no other: they read sizes off its inputs.
        places: where its other nodes stand in the list of nodes of the whole model, as runs (first, count). A node that several
            stages compute has one place.
        onnx: the same stage as an ONNX model, if there is one.
    """

    graph: str
    weights: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    nodes: Int64 = 0
    weight_bytes: Int64 = 0
    flops: Int64 = 0
    namespaces: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    added: Int64 = 0
    places: tuple[Run, ...] = ()
    onnx: Onnx | None = None

    @property
    def onnx_files(self) -> tuple[str, ...]:
        """The names of the files that it has as an ONNX model."""
        return () if self.onnx is None else (self.onnx.model, *self.onnx.weights)

    @property
    def node_numbers(self) -> list[int]:
        """Where each node stands in the list of nodes of the whole model; -1 for one that was added."""
        return [-1] * self.added + list(run_members(self.places))


class File(Struct, frozen=True, kw_only=True):
    """A file of the bundle: its size in bytes, and the SHA-256 of its content in hexadecimal."""

    name: str
    size: Int64
    sha256: str


class Manifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole manifest. `sha256` covers the manifest itself, written with 64 zeros in its place (SPEC D3).

    Attributes:
        device: the type of the device that the model was captured on.
        plan: how the model was cut, and what the stages were expected to cost.
        seed: the seed of the random generators under which the example was recorded.
        sha256: stands last, so that its place in the file is known.
    """

    format: str
    version: str
    producer: Producer
    signature: Signature
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    files: tuple[File, ...]
    device: str
    features: tuple[str, ...] = ()
    plan: Plan | None = None
    symbols: tuple[Symbol, ...] = ()
    seed: Int64 = 0
    sha256: str
