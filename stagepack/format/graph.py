"""The graph of a model or of a stage: one type for both (SPEC G1 to G15).

A graph is pure data: operators, scopes and contexts stand in tables, and the nodes refer to them by index.
Values have names; a name is an identifier and is made once (static single assignment).
"""

from typing import Literal

from msgspec import Struct

from stagepack.format.limits import Int64
from stagepack.format.shapes import Dim, Symbol
from stagepack.format.signature import Signature


class Value(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor, or a symbolic scalar.

    Attributes:
        dtype: a torch dtype such as ``float32``, or ``symint``, ``symfloat``, ``symbool`` for a scalar.
        shape: the tensor's dimensions; empty for a scalar.
        expr: what a ``symint`` equals, where that is known.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...] = ()
    expr: Dim | None = None


class Weight(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor that belongs to the model, and where its bytes lie.

    Attributes:
        value: the name under which nodes use it.
        names: its fully qualified names in the model; more than one for a tied weight. The first is the stored one.
        shape: plain integers.
        trainable: torch's ``requires_grad``.
        strides: in elements, when the tensor in memory is not contiguous; in the file it always is.
        base: the stored tensor on whose memory this one is a view (`strides`, `offset`), when it has no bytes of its own.
        offset: in elements of `dtype` from the start of `base`.
        zeros: every bit is zero, so no file holds it.
    """

    value: str
    names: tuple[str, ...]
    kind: Literal["parameter", "buffer", "non_persistent_buffer", "constant"]
    dtype: str
    shape: tuple[Int64, ...] = ()
    trainable: bool = False
    strides: tuple[Int64, ...] | None = None
    base: str | None = None
    offset: Int64 = 0
    zeros: bool = False

    @property
    def stored(self) -> str:
        """The name of the tensor that holds the bytes: in a weight file, unless it is all zeros."""
        return self.names[0] if self.base is None else self.base


class ValueArg(Struct, frozen=True, array_like=True, tag="value"):
    """A value made by an input, a weight or an earlier node."""

    name: str


class ListArg(Struct, frozen=True, array_like=True, tag="list"):
    """A list of arguments."""

    items: tuple["Argument", ...]


class TupleArg(Struct, frozen=True, array_like=True, tag="tuple"):
    """A tuple of arguments."""

    items: tuple["Argument", ...]


class DictArg(Struct, frozen=True, array_like=True, tag="dict"):
    """A dict with string keys, in order."""

    items: tuple[tuple[str, "Argument"], ...]


class SliceArg(Struct, frozen=True, array_like=True, tag="slice"):
    """A Python slice."""

    start: "Argument"
    stop: "Argument"
    step: "Argument"


class ComplexArg(Struct, frozen=True, array_like=True, tag="complex"):
    """A complex number."""

    real: float
    imag: float


class DtypeArg(Struct, frozen=True, array_like=True, tag="dtype"):
    """A torch dtype by name."""

    name: str


class DeviceArg(Struct, frozen=True, array_like=True, tag="device"):
    """A device: None is the stage's own; a type such as ``cpu`` was named on purpose by the model's author."""

    name: str | None


class LayoutArg(Struct, frozen=True, array_like=True, tag="layout"):
    """A torch layout by name, such as ``strided``."""

    name: str


class MemoryFormatArg(Struct, frozen=True, array_like=True, tag="memory_format"):
    """A torch memory format by name, such as ``channels_last``."""

    name: str


class SubgraphArg(Struct, frozen=True, array_like=True, tag="subgraph"):
    """A subgraph of the same graph by its index."""

    index: Int64


Argument = (
    None
    | bool
    | Int64
    | float
    | str
    | ValueArg
    | ListArg
    | TupleArg
    | DictArg
    | SliceArg
    | ComplexArg
    | DtypeArg
    | DeviceArg
    | LayoutArg
    | MemoryFormatArg
    | SubgraphArg
)


class Op(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An operator, once for all nodes that call it.

    Attributes:
        name: namespace, name and overload (``aten.linear.default``), or a Python operator on scalars
            (``operator.mul``), or a higher-order operator (``higher_order.cond``).
        schema: the schema it was exported under; empty for Python and higher-order operators.
        parameters: the names of the schema's parameters in order.
        mutates: the parameters that are written.
        aliases: pairs (index of the output, parameter): the output may share memory with the parameter.
        random: draws from a random generator.
    """

    name: str
    schema: str = ""
    parameters: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    aliases: tuple[tuple[Int64, str], ...] = ()
    random: bool = False


class Scope(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The module that a node came from: its path in the model, and the name of its class."""

    path: str
    type: str = ""


class Autocast(Struct, frozen=True, kw_only=True):
    """A ``torch.autocast`` context; `device` None is the type of the stage's own device."""

    device: str | None
    dtype: str
    enabled: bool
    cache: bool


class Context(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What nodes run in: a grad mode or autocast, inside the context `parent` (an earlier index)."""

    parent: Int64 | None = None
    grad: bool | None = None
    autocast: Autocast | None = None


class Cost(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one call costs at the sizes of the example: floating-point operations, and bytes read and written."""

    flops: Int64 = 0
    bytes: Int64 = 0


class Node(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of an operator.

    Attributes:
        op: index into the op table.
        outputs: the values it makes; None for a result that is None or that nobody uses.
        unpack: the operator returns a sequence, and `outputs` names its items.
        scope: index into the scope table.
        context: index into the context table; None in none of them.
    """

    op: Int64
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[Value | None, ...] = ()
    unpack: bool = False
    scope: Int64 = 0
    context: Int64 | None = None
    cost: Cost = Cost()


class Subgraph(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a higher-order operator. It sees its inputs alone; tables are those of the graph around it.

    Subgraphs that it uses itself stand before it, so that nothing is recursive. `result` is what it returns: a value, or a
    list or tuple of values and constants.
    """

    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    result: Argument


class ModuleCall(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call of a module: a run of nodes of the whole model, of which a stage may have some.

    Attributes:
        path: the module's path in the model; from its second call on with ``@1`` and so on at the end.
        type: the name of its class.
        first: where the first of its nodes stands in the list of nodes of the whole model; in digits, so that it may be a template.
        nodes: how many nodes it has, those of modules inside it too.
        signature: what it was given and gave back, as it was called; a leaf may name a value that nothing uses and that is not in
            the graph. None when the capture did not tell.
    """

    path: str
    type: str = ""
    first: str
    nodes: Int64
    signature: Signature | None = None


class Graph(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model before the cut, or a stage after it. `outputs` are names of values; `calls` stand in the order of their nodes."""

    symbols: tuple[Symbol, ...] = ()
    inputs: tuple[Value, ...] = ()
    weights: tuple[Weight, ...] = ()
    nodes: tuple[Node, ...] = ()
    outputs: tuple[str, ...] = ()
    subgraphs: tuple[Subgraph, ...] = ()
    ops: tuple[Op, ...] = ()
    scopes: tuple[Scope, ...] = ()
    contexts: tuple[Context, ...] = ()
    calls: tuple[ModuleCall, ...] = ()
