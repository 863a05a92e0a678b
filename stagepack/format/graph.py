"""The graph of a whole model or of a stage; both have the same type (SPEC section 7).

A graph is pure data. Operators, scopes and contexts are entries of tables, and nodes refer to them by index. A value name is an
identifier and is defined once (static single assignment).
"""

import math
from collections.abc import Mapping
from typing import Generic, Literal, NamedTuple, TypeVar

from msgspec import Struct

from stagepack.format.dtypes import ITEM_SIZE, SCALAR_DTYPES
from stagepack.format.limits import Int64
from stagepack.format.shapes import Dim, Symbol, evaluate_dim
from stagepack.format.tree import Signature

# Counted for a symbolic scalar, and for a value whose size cannot be computed.
_SCALAR_BYTES = 8
# No memory has more; a stranger's bundle may state dimensions whose product is larger than any number of a file.
_MAX_BYTES = 2**53


# Objects of a graph are in no cycles. `gc=False` keeps them from the collector, which would walk through all objects of torch, for 0.1 s,
# once more while 32 graphs are read.


class Value(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A tensor or a symbolic scalar.

    Attributes:
        name: the name by which nodes use it.
        dtype: a torch dtype such as ``float32``, or ``symint``, ``symfloat``, ``symbool`` for a symbolic scalar.
        shape: the dimensions of a tensor; empty for a symbolic scalar.
        expr: the value of a ``symint`` as a dimension, if it is known.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...] = ()
    expr: Dim | None = None


def value_bytes(value: Value, sizes: Mapping[str, int]) -> int:
    """Return the size of a value in bytes, at most 2**53; 8 for a symbolic scalar and for a shape that cannot be evaluated."""
    if value.dtype in SCALAR_DTYPES:
        return _SCALAR_BYTES
    try:
        element_count = math.prod(evaluate_dim(dim, sizes) for dim in value.shape)
    except (ArithmeticError, KeyError):
        return _SCALAR_BYTES
    return min(max(0, element_count) * ITEM_SIZE.get(value.dtype, 8), _MAX_BYTES)


class Weight(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A parameter, buffer or constant of the model, and the location of its bytes.

    Attributes:
        value: the value name by which nodes use it.
        names: its fully qualified names in the model; several for tied weights. The stored tensor has the first one.
        kind: parameter, buffer, buffer that is not in the `state_dict`, or constant.
        dtype: a torch dtype such as ``float32``.
        shape: the sizes of its dimensions, as integers.
        trainable: ``requires_grad`` of torch.
        strides: the strides in memory, in elements; None for a contiguous tensor. The stored tensor is always contiguous.
        base: the name of the stored tensor that it is a view of; None for a weight that is stored itself.
        offset: the position of its first element in `base`, in elements of `dtype`.
        zeros: every bit is zero, and no file stores it.
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
        """The name of the stored tensor that has its bytes. If `zeros` is true, no file has a tensor of this name."""
        return self.names[0] if self.base is None else self.base

    @property
    def owned_names(self) -> tuple[str, ...]:
        """The names of the weight and of its stored tensor: another weight with one of them has the same memory."""
        return self.names if self.base is None else (*self.names, self.base)

    @property
    def zero_bytes(self) -> int:
        """The bytes of a weight of zeros, which no file has; 0 for other weights."""
        return math.prod(self.shape) * ITEM_SIZE.get(self.dtype, 1) if self.zeros else 0


class ValueArg(Struct, frozen=True, array_like=True, tag="value", gc=False):
    """A value that an input, a weight or an earlier node defines."""

    name: str


class ListArg(Struct, frozen=True, array_like=True, tag="list", gc=False):
    """A list of arguments."""

    items: tuple["Argument", ...]


class TupleArg(Struct, frozen=True, array_like=True, tag="tuple", gc=False):
    """A tuple of arguments."""

    items: tuple["Argument", ...]


class DictArg(Struct, frozen=True, array_like=True, tag="dict", gc=False):
    """A dict with string keys; the order of its items is kept."""

    items: tuple[tuple[str, "Argument"], ...]


class SliceArg(Struct, frozen=True, array_like=True, tag="slice", gc=False):
    """A Python slice."""

    start: "Argument"
    stop: "Argument"
    step: "Argument"


class ComplexArg(Struct, frozen=True, array_like=True, tag="complex", gc=False):
    """A complex number."""

    real: float
    imag: float


class DtypeArg(Struct, frozen=True, array_like=True, tag="dtype", gc=False):
    """A torch dtype by name, such as ``float32``."""

    name: str


class DeviceArg(Struct, frozen=True, array_like=True, tag="device", gc=False):
    """A device: None for the device of the stage, or a device type such as ``cpu`` that the model itself names."""

    name: str | None


class LayoutArg(Struct, frozen=True, array_like=True, tag="layout", gc=False):
    """A torch layout by name, such as ``strided``."""

    name: str


class MemoryFormatArg(Struct, frozen=True, array_like=True, tag="memory_format", gc=False):
    """A torch memory format by name, such as ``channels_last``."""

    name: str


class SubgraphArg(Struct, frozen=True, array_like=True, tag="subgraph", gc=False):
    """A subgraph of the same graph, by its index."""

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


class Op(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """An operator that nodes call.

    Attributes:
        name: namespace, name and overload (``aten.linear.default``); or a Python function of symbolic scalars (``operator.mul``); or a
            higher-order operator (``higher_order.cond``).
        schema: the schema of the operator in the torch that exported the model; empty for Python functions and higher-order operators.
        parameters: the names of the parameters of the schema, in order.
        mutates: the parameters whose memory the operator writes.
        aliases: pairs (index of the output, parameter) that may share memory.
        random: the operator draws from a random generator.
    """

    name: str
    schema: str = ""
    parameters: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    aliases: tuple[tuple[Int64, str], ...] = ()
    random: bool = False


class Scope(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The module that a node came from.

    Attributes:
        path: the path of the module in the model, such as ``layers.0.norm``.
        type: the name of its class.
    """

    path: str
    type: str = ""


class Autocast(Struct, frozen=True, kw_only=True):
    """A ``torch.autocast`` context.

    Attributes:
        device: the device type that it applies to; None for the device type of the stage.
        dtype: the torch dtype that operators are cast to.
        enabled: whether operators are cast.
        cache: whether casts of weights are kept while the context is open.
    """

    device: str | None
    dtype: str
    enabled: bool
    cache: bool


class Context(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A grad mode or autocast that nodes run in. Exactly one of `grad` and `autocast` is given.

    Attributes:
        parent: the index of the enclosing context, which is smaller than its own; None for an outermost context.
        grad: whether gradients are recorded.
        autocast: the autocast context.
    """

    parent: Int64 | None = None
    grad: bool | None = None
    autocast: Autocast | None = None


class Cost(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The cost of a node at the sizes of the example.

    Attributes:
        flops: floating-point operations.
        bytes: bytes read and written.
    """

    flops: Int64 = 0
    bytes: Int64 = 0


class Node(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One call of an operator.

    Attributes:
        op: the index of the operator in the op table.
        args: the positional arguments.
        kwargs: the keyword arguments, as pairs of name and argument.
        outputs: the values that it defines; None for a result that is None or unused.
        unpack: the operator returns a sequence, and `outputs` are its items.
        scope: the index of its scope in the scope table.
        context: the index of its innermost context in the context table; None for no context.
        cost: its cost at the sizes of the example.
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
    """The body of a higher-order operator.

    A subgraph uses the tables of the graph, but no values of it. It may call the subgraphs before it, so that no call is recursive.

    Attributes:
        inputs: the values that it takes.
        nodes: its nodes, in execution order.
        result: the value that it returns, or a list or tuple of values and constants.
    """

    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    result: Argument


class ModuleCall(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A call of a module of the original model: a run of consecutive nodes of the whole model. A stage may have only some of them.

    Attributes:
        path: the path of the module in the model; for its second, third call with ``@1``, ``@2`` at the end.
        type: the name of its class.
        first: the position of its first node in the list of nodes of the whole model, in decimal digits; a string because it may be a
            template.
        nodes: the number of its nodes, including the nodes of nested module calls.
        signature: the arguments and the result of this call; None if the capture did not record them. A leaf may name an unused value
            that the graph does not have.
    """

    path: str
    type: str = ""
    first: str
    nodes: Int64
    signature: Signature | None = None


_Item = TypeVar("_Item")


class _GraphTables(Struct, Generic[_Item], frozen=True, kw_only=True, omit_defaults=True):
    """The fields of a graph, and of the form in which its file stores it."""

    symbols: tuple[Symbol, ...] = ()
    inputs: tuple[Value, ...] = ()
    weights: tuple[Weight, ...] = ()
    nodes: tuple[_Item, ...] = ()
    outputs: tuple[str, ...] = ()
    subgraphs: tuple[Subgraph, ...] = ()
    ops: tuple[Op, ...] = ()
    scopes: tuple[Scope, ...] = ()
    contexts: tuple[Context, ...] = ()
    calls: tuple[ModuleCall, ...] = ()


class Graph(_GraphTables[Node], frozen=True, kw_only=True, omit_defaults=True):
    """A model before the cut, or a stage after it.

    Attributes:
        symbols: the symbols in the shapes of its values.
        inputs: the values that it takes, in order.
        weights: its parameters, buffers and constants.
        nodes: its nodes, in execution order.
        outputs: the names of the values that it returns, in order.
        subgraphs: the bodies of higher-order operators.
        ops: the op table.
        scopes: the scope table.
        contexts: the context table.
        calls: the module calls, in the order of their nodes.
    """


class RegionCall(NamedTuple):
    """One occurrence of a region: the index of the region, and the texts for its holes. In a region these texts are templates too."""

    region: Int64
    holes: tuple[str, ...]


class Region(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run of nodes that occurs in the graph several times.

    The names of values, symbols, weights, scopes and module calls are templates. ``{2}`` is the third text of the region call;
    ``{2+5}`` is this text as a number, plus 5; ``{{`` and ``}}`` are braces.

    Attributes:
        nodes: the nodes. They refer to the scopes of the region, and to the operators, contexts and subgraphs of the graph.
        weights: the weights that each region call adds to the graph.
        scopes: the scopes of the nodes.
        calls: the module calls that each region call adds to the graph.
    """

    nodes: tuple[Node | RegionCall, ...]
    weights: tuple[Weight, ...] = ()
    scopes: tuple[Scope, ...] = ()
    calls: tuple[ModuleCall, ...] = ()


class FoldedGraph(_GraphTables[Node | RegionCall], frozen=True, kw_only=True, omit_defaults=True):
    """The fields of a `Graph`, with region calls among its nodes, and the regions.

    Attributes:
        symbols: see `Graph`.
        inputs: see `Graph`.
        weights: the weights that no region call adds.
        nodes: nodes and region calls, in execution order.
        outputs: see `Graph`.
        subgraphs: see `Graph`.
        ops: see `Graph`.
        scopes: the scopes of the nodes that no region call adds.
        contexts: see `Graph`.
        calls: the module calls that no region call adds.
        regions: the regions. A region may call the regions before it.
    """

    regions: tuple[Region, ...] = ()
