"""The rules on a graph (SPEC G1 to G15)."""

import math
from collections.abc import Iterator

from stagepack.errors import Problem
from stagepack.format import limits
from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.graph import (
    Argument,
    Context,
    DeviceArg,
    DictArg,
    DtypeArg,
    Graph,
    LayoutArg,
    ListArg,
    MemoryFormatArg,
    ModuleCall,
    Node,
    Op,
    SliceArg,
    Subgraph,
    SubgraphArg,
    TupleArg,
    Value,
    ValueArg,
    Weight,
)
from stagepack.format.operators import is_denied_operator, is_operator_name
from stagepack.format.traversal import child_arguments, sort_module_calls, subgraph_indices
from stagepack.format.validate.names import DECIMAL_PATTERN, WORD_PATTERN, is_identifier, is_tensor_name
from stagepack.format.validate.problems import BrokenRule
from stagepack.format.validate.signature import check_depth, check_signature
from stagepack.format.validate.sizes import check_symbols, check_type

_TRAINABLE = ("float", "bfloat", "complex")  # how the names of dtypes begin that have gradients


def check_graph(graph: Graph, where: str) -> Iterator[Problem]:
    """Yield the rules G and S that a graph breaks; `where` is the name of its file."""
    for rule, place, message in _graph(graph):
        yield Problem(rule=rule, where=f"{where}: {place}", message=message)


def _graph(graph: Graph) -> Iterator[BrokenRule]:
    yield from check_symbols(graph.symbols)
    symbols = {symbol.name for symbol in graph.symbols}
    yield from _ops(graph.ops)
    yield from _contexts(graph.contexts)
    for number, scope in enumerate(graph.scopes):
        if max(len(scope.path), len(scope.type)) > limits.NAME_CHARACTERS:
            yield "L1", f"scope {number}", "the name is too long"
    made: set[str] = set()
    for value in graph.inputs:
        yield from _made(value, symbols, made, "input")
    yield from _weights(graph.weights, made)
    for number, subgraph in enumerate(graph.subgraphs):
        yield from _body(graph, subgraph, symbols, set(), number, f"subgraph {number} ")
    yield from _subgraph_depths(graph)
    yield from _body(graph, graph, symbols, made, len(graph.subgraphs), "")
    for name in graph.outputs:
        if name not in made:
            yield "G3", "outputs", f"{name[:80]!r} is made nowhere"
    yield from _calls(graph.calls)


def _calls(calls: tuple[ModuleCall, ...]) -> Iterator[BrokenRule]:
    """The rules on the calls of modules."""
    seen: set[str] = set()
    open_: list[int] = []  # where calls around this one end
    sound = True
    for call in calls:
        where = f"call of {call.path[:80]!r}"
        if max(len(call.path), len(call.type)) > limits.NAME_CHARACTERS:
            yield "L1", where, "the name is too long"
        if not all(call.path.split(".")) or call.path in seen:
            yield "G15", where, "the path has an empty part, or stands twice"
        seen.add(call.path)
        if not DECIMAL_PATTERN.fullmatch(call.first) or call.nodes < 1:
            sound = False
            yield "G15", where, f"{call.first[:80]!r} is not the place of a node, or it has {call.nodes} nodes"
        if call.signature is not None:
            deep = list(check_depth(call.signature, where))
            yield from deep or check_signature(call.signature, where)
    for call in sort_module_calls(calls) if sound else ():
        first, end = int(call.first), int(call.first) + call.nodes
        while open_ and open_[-1] <= first:
            open_.pop()
        if open_ and open_[-1] < end:
            yield "G15", f"call of {call.path[:80]!r}", "another call ends in the middle of it"
        open_.append(end)
        if len(open_) > limits.NESTING_DEPTH:
            yield "L2", f"call of {call.path[:80]!r}", f"calls of modules are nested deeper than {limits.NESTING_DEPTH}"
            break


def _contexts(contexts: tuple[Context, ...]) -> Iterator[BrokenRule]:
    depths: list[int] = []
    for number, context in enumerate(contexts):
        where = f"context {number}"
        before = context.parent is None or 0 <= context.parent < number
        if not before or (context.grad is None) == (context.autocast is None):
            yield "G5", where, "the parent does not stand before it, or it is not one of grad and autocast"
        words = () if context.autocast is None else (context.autocast.dtype, context.autocast.device or "own")
        if not all(WORD_PATTERN.fullmatch(word) for word in words):
            yield "G13", where, "the dtype or the device of autocast is not a name"
        depths.append(1 + (depths[context.parent] if before and context.parent is not None else 0))
        if depths[-1] > limits.NESTING_DEPTH:
            yield "L2", where, f"contexts are nested deeper than {limits.NESTING_DEPTH}"


def _subgraph_depths(graph: Graph) -> Iterator[BrokenRule]:
    """The depth of subgraphs that call subgraphs; an index that is not one is told elsewhere."""
    depths: list[int] = []
    for number, subgraph in enumerate(graph.subgraphs):
        called = (index for node in subgraph.nodes for index in subgraph_indices(node) if 0 <= index < number)
        depths.append(1 + max((depths[index] for index in called), default=0))
        if depths[-1] > limits.NESTING_DEPTH:
            yield "L2", f"subgraph {number}", f"calls of subgraphs are nested deeper than {limits.NESTING_DEPTH}"


def _ops(ops: tuple[Op, ...]) -> Iterator[BrokenRule]:
    seen: set[str] = set()
    for number, op in enumerate(ops):
        if op.name in seen:
            yield "G12", f"op {number}", f"{op.name[:80]!r} stands twice"
        seen.add(op.name)
        yield from _op(op, f"op {number}")


def _op(op: Op, where: str) -> Iterator[BrokenRule]:
    if not is_operator_name(op.name) or len(op.name) > limits.NAME_CHARACTERS:
        yield "G10", where, f"{op.name[:80]!r} is not the name of an operator"
    elif is_denied_operator(op.name):
        yield "G11", where, f"{op.name} is not allowed in a bundle"
    known = set(op.parameters)
    if len(known) != len(op.parameters) or not known.issuperset(
        (*op.mutates, *(parameter for _, parameter in op.aliases))
    ):
        yield "G12", where, f"{op.name[:80]}: a parameter stands twice, or mutates and aliases name one that it lacks"
    if any(index < 0 for index, _ in op.aliases):
        yield "G12", where, f"{op.name[:80]}: aliases name a result below 0"


def _weights(weights: tuple[Weight, ...], made: set[str]) -> Iterator[BrokenRule]:
    seen: set[str] = set()
    for weight in weights:
        where = f"weight {weight.value[:80]}"
        if not is_identifier(weight.value):
            yield "G1", where, "the name is not an identifier"
        if weight.value in made:
            yield "G2", where, "the name is made twice"
        made.add(weight.value)
        if not weight.names or len(set(weight.names)) != len(weight.names) or seen.intersection(weight.names):
            yield "G9", where, "it has no name, or one that stands twice"
        seen.update(weight.names)
        if not all(map(is_tensor_name, weight.names if weight.base is None else (*weight.names, weight.base))):
            yield "G9", where, "a name is empty, too long, or one that weight files use for themselves"
        if weight.dtype not in ITEM_SIZE or (weight.trainable and not weight.dtype.startswith(_TRAINABLE)):
            yield "G9", where, f"{weight.dtype[:80]!r} is not a dtype of stored tensors, or not one that can be trained"
        yield from _layout(weight, where)


def _layout(weight: Weight, where: str) -> Iterator[BrokenRule]:
    """The rules on shape, strides and offset."""
    numbers = (*weight.shape, *(weight.strides or ()), weight.offset)
    if len(weight.shape) > limits.RANK or not all(0 <= number <= limits.TENSOR_ELEMENTS for number in numbers):
        yield "G9", where, "too many dimensions, or a number of its layout is not one"
    elif (
        math.prod(size or 1 for size in weight.shape) > limits.TENSOR_ELEMENTS
    ):  # also of none: torch multiplies up to the zero
        yield "G9", where, f"more than {limits.TENSOR_ELEMENTS} elements"
    elif len(weight.shape if weight.strides is None else weight.strides) != len(weight.shape):
        yield "G9", where, "the strides do not fit the shape"
    elif weight.base is None and (weight.offset or not _is_dense(weight)):
        yield "G9", where, "a tensor with bytes of its own has an offset, or strides that leave gaps or overlap"
    elif weight.base is not None and (weight.strides is None or weight.zeros):
        yield "G9", where, "a view has no strides, or no bytes"


def _is_dense(weight: Weight) -> bool:
    """Whether the elements lie side by side in memory, in whatever order of the dimensions."""
    reach = 1
    for stride, size in sorted(zip(weight.strides or (), weight.shape, strict=False)):
        if size > 1 and stride != reach:
            return 0 in weight.shape
        reach *= size
    return True


def _made(value: Value, symbols: set[str], made: set[str], where: str) -> Iterator[BrokenRule]:
    if not is_identifier(value.name):
        yield "G1", where, f"{value.name[:80]!r} is not an identifier"
    if value.name in made:
        yield "G2", where, f"{value.name[:80]!r} is made twice"
    made.add(value.name)
    yield from check_type(value, symbols, "G7", f"value {value.name[:80]}")


def _body(
    graph: Graph, body: Graph | Subgraph, symbols: set[str], made: set[str], callable_below: int, prefix: str
) -> Iterator[BrokenRule]:
    """The rules on the nodes of a graph or a subgraph; it may call subgraphs below an index."""
    if isinstance(body, Subgraph):
        for value in body.inputs:
            yield from _made(value, symbols, made, f"{prefix}input")
    for number, node in enumerate(body.nodes):
        where = f"{prefix}node {number}"
        yield from _tables(graph, node, where)
        for argument in (*node.args, *(argument for _, argument in node.kwargs)):
            if type(argument) is not ValueArg or argument.name not in made:  # most are known values: graphs are large
                yield from _argument(argument, made, callable_below, where)
        for name, _ in node.kwargs:
            if not is_identifier(name):
                yield "G1", where, f"the argument name {name[:80]!r} is not an identifier"
        yield from _call(node, where)
        for output in node.outputs:
            if output is not None:
                yield from _made(output, symbols, made, where)
    if isinstance(body, Subgraph):
        yield from _argument(body.result, made, callable_below, f"{prefix}result")


def _tables(graph: Graph, node: Node, where: str) -> Iterator[BrokenRule]:
    if not 0 <= node.op < len(graph.ops):
        yield "G4", where, f"op {node.op} is not in the table"
    if not 0 <= node.scope < len(graph.scopes):
        yield "G4", where, f"scope {node.scope} is not in the table"
    if node.context is not None and not 0 <= node.context < len(graph.contexts):
        yield "G4", where, f"context {node.context} is not in the table"


def _call(node: Node, where: str) -> Iterator[BrokenRule]:
    if not node.unpack and len(node.outputs) > 1:
        yield "G8", where, "several outputs of an operator that returns no sequence"
    if node.kwargs and len({name for name, _ in node.kwargs}) != len(node.kwargs):
        yield "G8", where, "an argument stands twice"
    if min(node.cost.flops, node.cost.bytes) < 0:
        yield "G8", where, "a cost is negative"


def _argument(
    argument: Argument, made: set[str], callable_below: int, where: str, depth: int = 0
) -> Iterator[BrokenRule]:
    if depth > limits.NESTING_DEPTH:
        yield "L2", where, f"arguments are nested deeper than {limits.NESTING_DEPTH}"
    elif isinstance(argument, ValueArg):
        if argument.name not in made:
            yield "G3", where, f"uses {argument.name[:80]!r}, which is not made before it"
    elif isinstance(argument, ListArg | TupleArg | DictArg | SliceArg):
        if isinstance(argument, DictArg) and len({key for key, _ in argument.items}) != len(argument.items):
            yield "G8", where, "a key of a dict stands twice"
        for part in child_arguments(argument):
            yield from _argument(part, made, callable_below, where, depth + 1)
    elif isinstance(argument, SubgraphArg):
        if not 0 <= argument.index < callable_below:
            yield "G6", where, f"calls subgraph {argument.index}, which does not stand before it"
    elif (
        isinstance(argument, DtypeArg | LayoutArg | MemoryFormatArg | DeviceArg)
        and argument.name is not None
        and not WORD_PATTERN.fullmatch(argument.name)
    ):
        yield "G13", where, f"{argument.name[:80]!r} is not a name of its kind"
