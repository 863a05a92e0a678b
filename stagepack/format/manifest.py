"""The manifest: the root of a bundle, `manifest.json`, and the format version that this code writes (SPEC section 4)."""

from msgspec import Struct

from stagepack.format.chunks import File
from stagepack.format.graph import Value
from stagepack.format.limits import Int64
from stagepack.format.plan import Plan, Run, run_members
from stagepack.format.rules import INDEX_NAME
from stagepack.format.shapes import Guard, Symbol, format_shape
from stagepack.format.tree import Signature

MAJOR = 1
MINOR = 0
VERSION = f"{MAJOR}.{MINOR}"
# The names that `Manifest.features` may list. A reader refuses any other name.
FEATURES: frozenset[str] = frozenset({"named_tuples"})


class Producer(Struct, frozen=True, kw_only=True):
    """The versions of the software that wrote the bundle, for diagnosis. No reader decides by it.

    Attributes:
        stagepack: the version of stagepack.
        torch: the version of torch.
    """

    stagepack: str
    torch: str


class Edge(Value, frozen=True, kw_only=True, omit_defaults=True):
    """A value that enters the model, crosses from a stage to later stages, or leaves the model.

    Attributes:
        name: the value name, in all graphs that have the value.
        dtype: a torch dtype such as ``float32``, or ``symint``, ``symfloat``, ``symbool`` for a symbolic scalar.
        shape: the dimensions of a tensor; empty for a symbolic scalar.
        expr: the value of a ``symint`` as a dimension, if it is known.
        producer: the number of the stage that computes it; None for an input of the model.
        consumers: the numbers of the stages that use it, ascending; empty if no stage does.
    """

    producer: Int64 | None = None
    consumers: tuple[Int64, ...] = ()


class Onnx(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stage as an ONNX model.

    Attributes:
        model: the name of the ONNX file.
        weights: the names of the weight files that only the ONNX model uses.
    """

    model: str
    weights: tuple[str, ...] = ()


class Stage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stage: its files, its edges, and facts for its placement.

    Attributes:
        graph: the name of its graph file.
        weights: the names of the weight files that it reads; its own first.
        inputs: the names of the edges that it takes, in the order of the inputs of its graph.
        outputs: the names of the edges that it returns, in the order of the outputs of its graph.
        nodes: the number of nodes of its graph.
        weight_bytes: bytes of the weights that it uses; each stored tensor counts once.
        flops: floating-point operations of one call at the sizes of the example.
        namespaces: the namespaces of operators that the caller must allow.
        state: the names of the weights that calls write.
        added: the number of leading nodes of its graph that exist in no other stage and are not part of the whole model. They read
            sizes off the inputs of the stage.
        places: the positions of its other nodes in the list of nodes of the whole model, as runs (first, count). A node that several
            stages compute has one position.
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
    def graph_files(self) -> tuple[str, ...]:
        """The names of the graph files that it is read from: one, unless it is several stages of the bundle, joined."""
        return (self.graph,)

    @property
    def onnx_files(self) -> tuple[str, ...]:
        """The names of the files that only its ONNX model needs: the ONNX file and its own weight files."""
        return () if self.onnx is None else (self.onnx.model, *self.onnx.weights)

    @property
    def node_numbers(self) -> list[int]:
        """The position of each node in the list of nodes of the whole model; -1 for an added node."""
        return [-1] * self.added + list(run_members(self.places))


class EntryPoint(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One function of the model that a caller may call, such as ``forward``, cut into stages.

    The entry points of a bundle share its files: a weight that several of them use is stored once.

    Attributes:
        name: its name in the bundle.
        signature: how it is called, and what it returns.
        stages: its stages in order.
        edges: all values that cross a boundary: the inputs first, then in the order in which they are computed.
        plan: how it was cut, and the estimated costs of the stages.
        example: the name of the file with the recorded example, if there is one.
        symbols: the symbols in the shapes of edges.
        guards: the conditions on sizes under which the graphs compute what the model computes.
        seed: the seed of the random generators under which the example was recorded.
    """

    name: str
    signature: Signature
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    plan: Plan | None = None
    example: str | None = None
    symbols: tuple[Symbol, ...] = ()
    guards: tuple[Guard, ...] = ()
    seed: Int64 = 0

    @property
    def inputs(self) -> tuple[Edge, ...]:
        """The edges without a producer."""
        return tuple(edge for edge in self.edges if edge.producer is None)


def format_stage_count(count: int) -> str:
    """Return a number of stages as text: ``1 stage``, ``2 stages``."""
    return f"{count} stage{'s' * (count != 1)}"


def format_inputs(entry_point: EntryPoint) -> str:
    """Return the inputs of an entry point as text, such as ``x: float32[batch, 64]``."""
    inputs = [
        f"{edge.name}: {edge.dtype}{format_shape(edge.shape) if edge.shape else ''}" for edge in entry_point.inputs
    ]
    return ", ".join(inputs) or "no inputs"


class Manifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole manifest.

    Attributes:
        format: always ``stagepack``.
        version: the format version, ``MAJOR.MINOR``.
        producer: the versions of the software that wrote the bundle.
        entry_points: the functions that a caller may call.
        files: all files of the bundle but the manifest and the signature over the bundle.
        device: the type of the device that the model was captured on, such as ``cpu``.
        features: named additions to the format that a reader must know to read the bundle.
        sha256: the digest of the manifest itself, computed with 64 zeros in its place. It is the last field, so that its position in the
            file is known.
    """

    format: str
    version: str
    producer: Producer
    entry_points: tuple[EntryPoint, ...]
    files: tuple[File, ...]
    device: str
    features: tuple[str, ...] = ()
    sha256: str


def further_file_names(manifest: Manifest) -> list[str]:
    """Return the names of the files that depend neither on the cut nor on the weights, such as ``config.json``."""
    rewritten_files = {INDEX_NAME}
    for entry_point in manifest.entry_points:
        rewritten_files.add(entry_point.example or "")
        for stage in entry_point.stages:
            rewritten_files |= {stage.graph, *stage.weights, *stage.onnx_files}
    return [file.name for file in manifest.files if file.name not in rewritten_files]
