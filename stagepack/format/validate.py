"""The rules of the format: what a manifest and a graph must hold beyond their types.

Each check cites the number of its rule in ``schema/SPEC.md`` and reports every problem, not the first.
"""

import itertools
import keyword
import math
import re
from collections.abc import Iterable, Iterator, Sequence

from stagepack.errors import FormatError, LimitError, Problem
from stagepack.format import limits
from stagepack.format.dtypes import ITEM_SIZE, SCALARS
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
from stagepack.format.manifest import Edge, File, Manifest, Stage
from stagepack.format.operators import NAMESPACES, is_denied, is_well_formed, namespace
from stagepack.format.shapes import OPERATIONS, Dim, Expr, Symbol
from stagepack.format.tree import DictTree, ObjectTree, SequenceTree, Tree, ValueLeaf, children, tree_leaves
from stagepack.format.walk import parts, subgraphs_used
from stagepack.format.weights import METADATA, PADDING

MANIFEST_NAME = "manifest.json"
SIGNATURE_NAME = "model.sig"

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_FILE_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,198}[A-Za-z0-9_-])?", re.ASCII)
_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TRAINABLE = ("float", "bfloat", "complex")  # how the names of dtypes begin that have gradients
_OF_MANY = frozenset({"add", "mul", "max", "min"})  # operations on two numbers or more; the others take two


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise one error with all the problems, if there are any; of very many the first ones.

    Raises:
        LimitError: every problem is a limit.
        FormatError: any other rule is broken.
    """
    found = list(itertools.islice(problems, limits.PROBLEMS))
    if found:
        raise (LimitError if all(problem.rule.startswith("L") for problem in found) else FormatError)(found)


def is_identifier(name: str) -> bool:
    """Whether a name may become the name of a value: ASCII, no keyword of Python, not too long (G1)."""
    return (
        _IDENTIFIER.fullmatch(name) is not None and not keyword.iskeyword(name) and len(name) <= limits.NAME_CHARACTERS
    )


def check_manifest(manifest: Manifest) -> Iterator[Problem]:
    """Yield the rules M, S and T that a manifest breaks."""
    for rule, where, message in _manifest(manifest):
        yield Problem(rule=rule, where=f"{MANIFEST_NAME}: {where}", message=message)


def check_graph(graph: Graph, where: str) -> Iterator[Problem]:
    """Yield the rules G and S that a graph breaks; `where` is the name of its file."""
    for rule, place, message in _graph(graph):
        yield Problem(rule=rule, where=f"{where}: {place}", message=message)


def check_stage(graph: Graph, stage: Stage, edges: dict[str, Edge]) -> Iterator[Problem]:
    """Yield the places where a stage's graph and the manifest disagree (G14)."""

    def problem(message: str) -> Problem:
        return Problem(rule="G14", where=stage.graph, message=message)

    if tuple(value.name for value in graph.inputs) != stage.inputs:
        yield problem(f"the manifest gives the inputs {_few(stage.inputs)}, the graph has other ones")
    if graph.outputs != stage.outputs:
        yield problem(f"the manifest gives the outputs {_few(stage.outputs)}, the graph has other ones")
    if len(graph.nodes) != stage.nodes:
        yield problem(f"the manifest counts {stage.nodes} nodes, the graph has {len(graph.nodes)}")
    if set(stage.namespaces) != {namespace(op.name) for op in graph.ops} - NAMESPACES:
        yield problem(f"the manifest gives the namespaces {_few(stage.namespaces)}, the graph has other ones")
    made = (value for node in graph.nodes for value in node.outputs if value is not None)
    values = {value.name: (value.dtype, value.shape, value.expr) for value in (*graph.inputs, *made)}
    values.update((weight.value, (weight.dtype, weight.shape, None)) for weight in graph.weights)
    for name in (*stage.inputs, *stage.outputs):
        edge, value = edges.get(name), values.get(name)
        if edge is not None and value not in (None, (edge.dtype, edge.shape, edge.expr)):
            yield problem(f"the value {name[:80]} has another dtype, shape or expr than its edge")


_Fault = tuple[str, str, str]  # rule, where, message


def _few(names: Sequence[object]) -> str:
    """The first of some names, for a message."""
    return ", ".join(str(name)[:80] for name in names[:9]) or "none"


def _manifest(manifest: Manifest) -> Iterator[_Fault]:
    if manifest.format != "stagepack":
        yield "M1", "format", f"expected 'stagepack', found {manifest.format[:80]!r}"
    if not 1 <= len(manifest.stages) <= limits.STAGES:
        yield "M4", "stages", f"expected 1 to {limits.STAGES}, found {len(manifest.stages)}"
    yield from _files(manifest.files)
    listed = {file.name for file in manifest.files}
    for number, stage in enumerate(manifest.stages):
        for name in (stage.graph, *stage.weights):
            if name not in listed:
                yield "M6", f"stage {number}", f"uses {name[:80]!r}, which is not among the files"
        if min(stage.nodes, stage.weight_bytes, stage.flops) < 0:
            yield "M7", f"stage {number}", "nodes, weight_bytes or flops is negative"
    yield from _symbols(manifest.symbols)
    if any(_too_deep(tree) for tree in _trees(manifest)):
        yield "L2", "signature", f"containers are nested deeper than {limits.DEPTH}"
    else:
        yield from _edges(manifest, {symbol.name for symbol in manifest.symbols})
        yield from _signature(manifest)
    if not _WORD.fullmatch(manifest.device):
        yield "M11", "device", f"{manifest.device[:80]!r} is not a device type"


def _files(files: tuple[File, ...]) -> Iterator[_Fault]:
    seen = {MANIFEST_NAME, SIGNATURE_NAME}
    for file in files:
        where = f"file {file.name[:80]!r}"
        if not _FILE_NAME.fullmatch(file.name):
            yield "M5", where, "not a plain file name"
        elif file.name.lower() in seen:
            yield "M5", where, "the name stands twice, where case is ignored, or has another use"
        seen.add(file.name.lower())
        if file.size < 0 or not _SHA256.fullmatch(file.sha256):
            yield "M5", where, "the size or the digest is not one"


def _symbols(symbols: tuple[Symbol, ...]) -> Iterator[_Fault]:
    seen: set[str] = set()
    for symbol in symbols:
        if not is_identifier(symbol.name) or symbol.name in seen:
            yield "S1", "symbols", f"{symbol.name[:80]!r} is not an identifier, or stands twice"
        seen.add(symbol.name)
        if symbol.min is not None and symbol.max is not None and symbol.min > symbol.max:
            yield "S1", f"symbol {symbol.name[:80]}", f"min {symbol.min} is over max {symbol.max}"


def _dim(dim: Dim, symbols: set[str], where: str, depth: int = 0) -> Iterator[_Fault]:
    if isinstance(dim, str):
        if dim not in symbols:
            yield "S2", where, f"the symbol {dim[:80]!r} is not declared"
    elif not isinstance(dim, Expr):
        if abs(dim) > limits.ELEMENTS:
            yield "S2", where, f"{dim} is too large"
    elif depth >= limits.DEPTH:
        yield "L2", where, f"arithmetic is nested deeper than {limits.DEPTH}"
    elif len(dim.args) > limits.TERMS:
        yield "L1", where, f"{len(dim.args)} numbers in one operation are over the limit of {limits.TERMS}"
    elif dim.op not in OPERATIONS or not 2 <= len(dim.args) <= (limits.TERMS if dim.op in _OF_MANY else 2):
        yield "S3", where, f"{dim.op[:80]!r} of {len(dim.args)} numbers is not arithmetic"
    else:
        for arg in dim.args:
            yield from _dim(arg, symbols, where, depth + 1)


def _typed(value: Value | Edge, symbols: set[str], rule: str, where: str) -> Iterator[_Fault]:
    """The rules on a dtype and a shape, which values and edges share."""
    if value.dtype not in ITEM_SIZE and value.dtype not in SCALARS and not _WORD.fullmatch(value.dtype):
        yield rule, where, f"{value.dtype[:80]!r} is not a dtype"
    if (value.dtype in SCALARS and value.shape) or (value.dtype != "symint" and value.expr is not None):
        yield rule, where, f"a {value.dtype[:80]} has no shape, or no expr"
    if len(value.shape) > limits.RANK:
        yield "L1", where, f"{len(value.shape)} dimensions are over the limit of {limits.RANK}"
    for dim in value.shape:
        yield from _dim(dim, symbols, where)
        if isinstance(dim, int) and dim < 0:
            yield "S2", where, f"{dim} is not a size"
    if value.expr is not None:
        yield from _dim(value.expr, symbols, where)


def _edges(manifest: Manifest, symbols: set[str]) -> Iterator[_Fault]:
    stages = range(len(manifest.stages))
    seen: set[str] = set()
    results = {leaf.name for leaf in tree_leaves(manifest.signature.result) if isinstance(leaf, ValueLeaf)}
    inputs: dict[int, list[str]] = {number: [] for number in stages}
    outputs: dict[int, list[str]] = {number: [] for number in stages}
    for edge in manifest.edges:
        where = f"edge {edge.name[:80]}"
        if not is_identifier(edge.name) or edge.name in seen:
            yield "M8", where, "the name is not an identifier, or stands twice"
        seen.add(edge.name)
        yield from _typed(edge, symbols, "M8", where)
        ends = (*(() if edge.producer is None else (edge.producer,)), *edge.consumers)
        if any(end not in stages for end in ends) or any(a >= b for a, b in itertools.pairwise(ends)):
            yield "M9", where, f"goes from {edge.producer} to {_few(edge.consumers)}: not later stages in order"
            continue
        if edge.producer is not None:
            outputs[edge.producer].append(edge.name)
            if not edge.consumers and edge.name not in results:
                yield "M9", where, "nobody uses it"
        for consumer in edge.consumers:
            inputs[consumer].append(edge.name)
    for number in stages:
        stage = manifest.stages[number]
        if list(stage.inputs) != inputs[number] or list(stage.outputs) != outputs[number]:
            yield "M10", f"stage {number}", "its inputs or outputs are not those that the edges give, in their order"


def _signature(manifest: Manifest) -> Iterator[_Fault]:
    signature = manifest.signature
    names = [parameter.name for parameter in signature.parameters]
    if len(set(names)) != len(names) or any(len(name) > limits.NAME_CHARACTERS for name in names):
        yield "T1", "signature", "a parameter stands twice, or its name is too long"
    positional = [parameter.positional for parameter in signature.parameters]
    if positional != sorted(positional, reverse=True):
        yield "T1", "signature", "a positional parameter follows one that is not"
    if any(not parameter.positional and not parameter.keyword for parameter in signature.parameters):
        yield "T1", "signature", "a parameter can be given neither by position nor by name"
    trees = [parameter.tree for parameter in signature.parameters]
    given = [leaf.name for tree in trees for leaf in tree_leaves(tree) if isinstance(leaf, ValueLeaf)]
    inputs = [edge.name for edge in manifest.edges if edge.producer is None]
    if sorted(given) != sorted(inputs):
        yield "T2", "signature", f"its parameters hold {_few(given)}, the edges into the model are {_few(inputs)}"
    made = {edge.name for edge in manifest.edges}
    for leaf in tree_leaves(signature.result):
        if isinstance(leaf, ValueLeaf) and leaf.name not in made:
            yield "T3", "signature", f"the result holds {leaf.name[:80]!r}, which no edge carries"
    for tree in _trees(manifest):
        yield from _containers(tree)


def _trees(manifest: Manifest) -> Iterator[Tree]:
    yield from (parameter.tree for parameter in manifest.signature.parameters)
    yield manifest.signature.result


def _containers(tree: Tree) -> Iterator[_Fault]:
    if isinstance(tree, SequenceTree) and tree.maxlen is not None:
        if tree.kind != "deque" or tree.maxlen < len(tree.items):
            yield "T4", "signature", f"a {tree.kind} of {len(tree.items)} items has the maxlen {tree.maxlen}"
    elif isinstance(tree, DictTree | ObjectTree):
        keys = [key for key, _ in (tree.items if isinstance(tree, DictTree) else tree.fields)]
        if len(set(keys)) != len(keys):
            yield "T4", "signature", f"a key of a container stands twice: {_few(keys)}"
    if isinstance(tree, DictTree) and tree.factory is not None and tree.kind != "defaultdict":
        yield "T4", "signature", f"a {tree.kind} has a factory"
    if isinstance(tree, ObjectTree) and len(tree.class_name) > limits.NAME_CHARACTERS:
        yield "T4", "signature", "the name of a class is too long"
    for child in children(tree):
        yield from _containers(child)


def _too_deep(tree: Tree, depth: int = 0) -> bool:
    return depth > limits.DEPTH or any(_too_deep(child, depth + 1) for child in children(tree))


def _graph(graph: Graph) -> Iterator[_Fault]:
    yield from _symbols(graph.symbols)
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


def _contexts(contexts: tuple[Context, ...]) -> Iterator[_Fault]:
    depths: list[int] = []
    for number, context in enumerate(contexts):
        where = f"context {number}"
        before = context.parent is None or 0 <= context.parent < number
        if not before or (context.grad is None) == (context.autocast is None):
            yield "G5", where, "the parent does not stand before it, or it is not one of grad and autocast"
        words = () if context.autocast is None else (context.autocast.dtype, context.autocast.device or "own")
        if not all(_WORD.fullmatch(word) for word in words):
            yield "G13", where, "the dtype or the device of autocast is not a name"
        depths.append(1 + (depths[context.parent] if before and context.parent is not None else 0))
        if depths[-1] > limits.DEPTH:
            yield "L2", where, f"regions are nested deeper than {limits.DEPTH}"


def _subgraph_depths(graph: Graph) -> Iterator[_Fault]:
    """The depth of subgraphs that call subgraphs; an index that is not one is told elsewhere."""
    depths: list[int] = []
    for number, subgraph in enumerate(graph.subgraphs):
        called = (index for node in subgraph.nodes for index in subgraphs_used(node) if 0 <= index < number)
        depths.append(1 + max((depths[index] for index in called), default=0))
        if depths[-1] > limits.DEPTH:
            yield "L2", f"subgraph {number}", f"calls of subgraphs are nested deeper than {limits.DEPTH}"


def _ops(ops: tuple[Op, ...]) -> Iterator[_Fault]:
    seen: set[str] = set()
    for number, op in enumerate(ops):
        if op.name in seen:
            yield "G12", f"op {number}", f"{op.name[:80]!r} stands twice"
        seen.add(op.name)
        yield from _op(op, f"op {number}")


def _op(op: Op, where: str) -> Iterator[_Fault]:
    if not is_well_formed(op.name) or len(op.name) > limits.NAME_CHARACTERS:
        yield "G10", where, f"{op.name[:80]!r} is not the name of an operator"
    elif is_denied(op.name):
        yield "G11", where, f"{op.name} is not allowed in a bundle"
    known = set(op.parameters)
    if len(known) != len(op.parameters) or not known.issuperset(
        (*op.mutates, *(parameter for _, parameter in op.aliases))
    ):
        yield "G12", where, f"{op.name[:80]}: a parameter stands twice, or mutates and aliases name one that it lacks"
    if any(index < 0 for index, _ in op.aliases):
        yield "G12", where, f"{op.name[:80]}: aliases name a result below 0"


def _weights(weights: tuple[Weight, ...], made: set[str]) -> Iterator[_Fault]:
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


def is_tensor_name(name: str) -> bool:
    """Whether a tensor may have this name in a weight file (G9)."""
    return 0 < len(name) <= limits.NAME_CHARACTERS and not name.startswith(PADDING) and name != METADATA


def _layout(weight: Weight, where: str) -> Iterator[_Fault]:
    """The rules on shape, strides and offset."""
    numbers = (*weight.shape, *(weight.strides or ()), weight.offset)
    if len(weight.shape) > limits.RANK or not all(0 <= number <= limits.ELEMENTS for number in numbers):
        yield "G9", where, "too many dimensions, or a number of its layout is not one"
    elif (
        math.prod(size or 1 for size in weight.shape) > limits.ELEMENTS
    ):  # also of none: torch multiplies up to the zero
        yield "G9", where, f"more than {limits.ELEMENTS} elements"
    elif len(weight.shape if weight.strides is None else weight.strides) != len(weight.shape):
        yield "G9", where, "the strides do not fit the shape"
    elif weight.base is None and (weight.offset or not _is_dense(weight)):
        yield "G9", where, "a tensor with bytes of its own has an offset, or strides that leave gaps or overlap"
    elif weight.base is not None and weight.strides is None:
        yield "G9", where, "a view has no strides"


def _is_dense(weight: Weight) -> bool:
    """Whether the elements lie side by side in memory, in whatever order of the dimensions."""
    reach = 1
    for stride, size in sorted(zip(weight.strides or (), weight.shape, strict=False)):
        if size > 1 and stride != reach:
            return 0 in weight.shape
        reach *= size
    return True


def _made(value: Value, symbols: set[str], made: set[str], where: str) -> Iterator[_Fault]:
    if not is_identifier(value.name):
        yield "G1", where, f"{value.name[:80]!r} is not an identifier"
    if value.name in made:
        yield "G2", where, f"{value.name[:80]!r} is made twice"
    made.add(value.name)
    yield from _typed(value, symbols, "G7", f"value {value.name[:80]}")


def _body(
    graph: Graph, body: Graph | Subgraph, symbols: set[str], made: set[str], callable_below: int, prefix: str
) -> Iterator[_Fault]:
    """The rules on the nodes of a graph or a subgraph; it may call subgraphs below an index."""
    if isinstance(body, Subgraph):
        for value in body.inputs:
            yield from _made(value, symbols, made, f"{prefix}input")
    for number, node in enumerate(body.nodes):
        where = f"{prefix}node {number}"
        yield from _tables(graph, node, where)
        for argument in (*node.args, *(argument for _, argument in node.kwargs)):
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


def _tables(graph: Graph, node: Node, where: str) -> Iterator[_Fault]:
    if not 0 <= node.op < len(graph.ops):
        yield "G4", where, f"op {node.op} is not in the table"
    if not 0 <= node.scope < len(graph.scopes):
        yield "G4", where, f"scope {node.scope} is not in the table"
    if node.context is not None and not 0 <= node.context < len(graph.contexts):
        yield "G4", where, f"context {node.context} is not in the table"


def _call(node: Node, where: str) -> Iterator[_Fault]:
    if not node.unpack and len(node.outputs) > 1:
        yield "G8", where, "several outputs of an operator that returns no sequence"
    if len({name for name, _ in node.kwargs}) != len(node.kwargs):
        yield "G8", where, "an argument stands twice"
    if min(node.cost.flops, node.cost.bytes) < 0:
        yield "G8", where, "a cost is negative"


def _argument(argument: Argument, made: set[str], callable_below: int, where: str, depth: int = 0) -> Iterator[_Fault]:
    if depth > limits.DEPTH:
        yield "L2", where, f"arguments are nested deeper than {limits.DEPTH}"
    elif isinstance(argument, ValueArg):
        if argument.name not in made:
            yield "G3", where, f"uses {argument.name[:80]!r}, which is not made before it"
    elif isinstance(argument, ListArg | TupleArg | DictArg | SliceArg):
        if isinstance(argument, DictArg) and len({key for key, _ in argument.items}) != len(argument.items):
            yield "G8", where, "a key of a dict stands twice"
        for part in parts(argument):
            yield from _argument(part, made, callable_below, where, depth + 1)
    elif isinstance(argument, SubgraphArg):
        if not 0 <= argument.index < callable_below:
            yield "G6", where, f"calls subgraph {argument.index}, which does not stand before it"
    elif (
        isinstance(argument, DtypeArg | LayoutArg | MemoryFormatArg | DeviceArg)
        and argument.name is not None
        and not _WORD.fullmatch(argument.name)
    ):
        yield "G13", where, f"{argument.name[:80]!r} is not a name of its kind"
