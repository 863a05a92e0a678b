"""The rules of the format: what a manifest and a graph must hold beyond their types.

Each check cites the number of its rule in ``schema/SPEC.md`` and reports every problem, not the first.
"""

import itertools
import keyword
import re
from collections.abc import Iterable, Iterator

from stagepack.errors import FormatError, LimitError, Problem
from stagepack.format import limits
from stagepack.format.dtypes import ITEM_SIZE, SCALARS
from stagepack.format.graph import (
    Argument,
    DeviceArg,
    DtypeArg,
    Graph,
    LayoutArg,
    MemoryFormatArg,
    Node,
    Op,
    Subgraph,
    SubgraphArg,
    Value,
    ValueArg,
    Weight,
)
from stagepack.format.manifest import Edge, Manifest, Stage
from stagepack.format.operators import is_denied, is_well_formed
from stagepack.format.shapes import OPERATIONS, Dim, Expr, Symbol
from stagepack.format.tree import Tree, ValueLeaf, children, tree_leaves
from stagepack.format.walk import leaves, parts

MANIFEST_NAME = "manifest.json"
SIGNATURE_NAME = "model.sig"

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}", re.ASCII)
_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise one error with all the problems, if there are any.

    Raises:
        LimitError: every problem is a limit.
        FormatError: any other rule is broken.
    """
    found = list(problems)
    if found:
        raise (LimitError if all(problem.rule.startswith("L") for problem in found) else FormatError)(found)


def is_identifier(name: str) -> bool:
    """Whether a name may become the name of a value: ASCII, no keyword of Python, not too long (G1)."""
    return (
        _IDENTIFIER.fullmatch(name) is not None and not keyword.iskeyword(name) and len(name) <= limits.NAME_CHARACTERS
    )


def check_manifest(manifest: Manifest) -> Iterator[Problem]:
    """Yield the rules M, S and T that a manifest breaks."""

    def problem(rule: str, where: str, message: str) -> Problem:
        return Problem(rule=rule, where=f"{MANIFEST_NAME}: {where}", message=message)

    if manifest.format != "stagepack":
        yield problem("M1", "format", f"expected 'stagepack', found {manifest.format!r}")
    if not 1 <= len(manifest.stages) <= limits.STAGES:
        yield problem("M4", "stages", f"expected 1 to {limits.STAGES}, found {len(manifest.stages)}")
    files = [file.name for file in manifest.files]
    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file.name) or file.name in (MANIFEST_NAME, SIGNATURE_NAME):
            yield problem("M5", "files", f"{file.name!r} is not a plain file name")
        if files.count(file.name) > 1 if len(files) < limits.STAGES else False:
            yield problem("M5", "files", f"{file.name!r} stands twice")
        if file.size < 0 or not _SHA256.fullmatch(file.sha256):
            yield problem("M5", f"files: {file.name}", "the size or the digest is not one")
    listed = set(files)
    for number, stage in enumerate(manifest.stages):
        for name in (stage.graph, *stage.weights):
            if name not in listed:
                yield problem("M6", f"stage {number}", f"uses {name!r}, which is not among the files")
        if min(stage.nodes, stage.weight_bytes, stage.flops) < 0:
            yield problem("M7", f"stage {number}", "nodes, weight_bytes or flops is negative")
    yield from (problem(rule, where, message) for rule, where, message in _symbols(manifest.symbols))
    symbols = {symbol.name for symbol in manifest.symbols}
    yield from (problem(*fault) for fault in _edges(manifest, symbols))
    yield from (problem(*fault) for fault in _signature(manifest))
    if not _WORD.fullmatch(manifest.device):
        yield problem("M14", "device", f"{manifest.device!r} is not a device type")


def check_graph(graph: Graph, where: str) -> Iterator[Problem]:
    """Yield the rules G and S that a graph breaks; `where` is the name of its file."""
    for fault in _graph(graph):
        yield Problem(rule=fault[0], where=f"{where}: {fault[1]}", message=fault[2])


def check_stage(graph: Graph, stage: Stage, edges: dict[str, Edge]) -> Iterator[Problem]:
    """Yield the places where a stage's graph and the manifest disagree (G14)."""

    def problem(message: str) -> Problem:
        return Problem(rule="G14", where=stage.graph, message=message)

    if tuple(value.name for value in graph.inputs) != stage.inputs:
        yield problem(f"the manifest gives the inputs {list(stage.inputs)}, the graph has other ones")
    if graph.outputs != stage.outputs:
        yield problem(f"the manifest gives the outputs {list(stage.outputs)}, the graph has other ones")
    if len(graph.nodes) != stage.nodes:
        yield problem(f"the manifest counts {stage.nodes} nodes, the graph has {len(graph.nodes)}")
    for value in graph.inputs:
        edge = edges.get(value.name)
        if edge is not None and (edge.dtype, edge.shape) != (value.dtype, value.shape):
            yield problem(f"the input {value.name} has another dtype or shape than its edge")


_Fault = tuple[str, str, str]  # rule, where, message


def _symbols(symbols: tuple[Symbol, ...]) -> Iterator[_Fault]:
    seen: set[str] = set()
    for symbol in symbols:
        if not is_identifier(symbol.name) or symbol.name in seen:
            yield "S1", "symbols", f"{symbol.name!r} is not an identifier, or stands twice"
        seen.add(symbol.name)
        if symbol.min is not None and symbol.max is not None and symbol.min > symbol.max:
            yield "S1", f"symbol {symbol.name}", f"min {symbol.min} is over max {symbol.max}"


def _dim(dim: Dim, symbols: set[str], depth: int = 0) -> str | None:
    """What is wrong with a dimension, or None."""
    if isinstance(dim, str):
        return None if dim in symbols else f"the symbol {dim!r} is not declared"
    if not isinstance(dim, Expr):
        return None if abs(dim) <= limits.ELEMENTS else f"{dim} is too large"
    if depth >= limits.DEPTH:
        return "nested too deep"
    if dim.op not in OPERATIONS or len(dim.args) < 2:
        return f"{dim.op!r} with {len(dim.args)} arguments is not arithmetic"
    if dim.op not in {"add", "mul", "max", "min"} and len(dim.args) != 2:
        return f"{dim.op!r} takes 2 arguments, found {len(dim.args)}"
    return next(filter(None, (_dim(arg, symbols, depth + 1) for arg in dim.args)), None)


def _typed(value: Value | Edge, symbols: set[str], rule: str, where: str) -> Iterator[_Fault]:
    """The rules on a dtype and a shape, which values and edges share."""
    if value.dtype not in ITEM_SIZE and value.dtype not in SCALARS and not _WORD.fullmatch(value.dtype):
        yield rule, where, f"{value.dtype!r} is not a dtype"
    if value.dtype in SCALARS and value.shape:
        yield rule, where, f"a {value.dtype} has no shape"
    if len(value.shape) > limits.RANK:
        yield "L1", where, f"{len(value.shape)} dimensions are over the limit of {limits.RANK}"
    for dim in value.shape if value.expr is None else (*value.shape, value.expr):
        fault = _dim(dim, symbols)
        if fault:
            yield "S2", where, fault
        elif isinstance(dim, int) and dim < 0 and value.expr is None:
            yield "S2", where, f"{dim} is not a size"


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
            yield "M9", where, f"goes from {edge.producer} to {list(edge.consumers)}: not later stages in order"
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
    trees = [*(parameter.tree for parameter in signature.parameters), signature.result]
    if any(_too_deep(tree) for tree in trees):
        yield "L2", "signature", f"containers are nested deeper than {limits.DEPTH}"
        return
    given = [leaf.name for tree in trees[:-1] for leaf in tree_leaves(tree) if isinstance(leaf, ValueLeaf)]
    inputs = [edge.name for edge in manifest.edges if edge.producer is None]
    if sorted(given) != sorted(inputs):
        yield "T2", "signature", f"its parameters hold {given[:9]}, the edges into the model are {inputs[:9]}"
    made = {edge.name for edge in manifest.edges}
    for leaf in tree_leaves(signature.result):
        if isinstance(leaf, ValueLeaf) and leaf.name not in made:
            yield "T3", "signature", f"the result holds {leaf.name!r}, which no edge carries"


def _too_deep(tree: Tree, depth: int = 0) -> bool:
    return depth > limits.DEPTH or any(_too_deep(child, depth + 1) for child in children(tree))


def _graph(graph: Graph) -> Iterator[_Fault]:
    yield from _symbols(graph.symbols)
    symbols = {symbol.name for symbol in graph.symbols}
    for number, op in enumerate(graph.ops):
        yield from _op(op, f"op {number}")
    for number, context in enumerate(graph.contexts):
        if (context.parent is not None and not 0 <= context.parent < number) or (context.grad is None) == (
            context.autocast is None
        ):
            yield (
                "G5",
                f"context {number}",
                "the parent does not stand before it, or it is not one of grad and autocast",
            )
        if context.autocast is not None and not all(
            _WORD.fullmatch(word) for word in (context.autocast.dtype, context.autocast.device or "own")
        ):
            yield "G13", f"context {number}", "the dtype or the device of autocast is not a name"
    for number, scope in enumerate(graph.scopes):
        if max(len(scope.path), len(scope.type)) > limits.NAME_CHARACTERS:
            yield "L1", f"scope {number}", "the name is too long"
    made: set[str] = set()
    for value in graph.inputs:
        yield from _made(value, symbols, made, "input")
    yield from _weights(graph.weights, made)
    for number, subgraph in enumerate(graph.subgraphs):
        yield from _body(graph, subgraph, symbols, set(), number, f"subgraph {number} ")
    yield from _body(graph, graph, symbols, made, len(graph.subgraphs), "")
    for name in graph.outputs:
        if name not in made:
            yield "G3", "outputs", f"{name[:80]!r} is made nowhere"


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


def _weights(weights: tuple[Weight, ...], made: set[str]) -> Iterator[_Fault]:
    seen: set[str] = set()
    for weight in weights:
        where = f"weight {weight.value[:80]}"
        if not is_identifier(weight.value) or weight.value in made:
            yield "G1" if weight.value not in made else "G2", where, "the name is not an identifier, or is made twice"
        made.add(weight.value)
        if (
            not weight.names
            or seen.intersection(weight.names)
            or not all(0 < len(name) <= limits.NAME_CHARACTERS for name in weight.names)
        ):
            yield "G9", where, "it has no name, one too long, or one that another weight has"
        seen.update(weight.names)
        numbers = (*weight.shape, *(weight.strides or ()), weight.offset)
        if (
            weight.dtype not in ITEM_SIZE
            or len(weight.shape) > limits.RANK
            or not all(0 <= number <= limits.ELEMENTS for number in numbers)
        ):
            yield "G9", where, "the dtype or a number of its layout is not one"
        if (weight.strides is None and weight.base is not None) or len(weight.strides or weight.shape) != len(
            weight.shape
        ):
            yield "G9", where, "the strides do not fit the shape, or a view has none"


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
        if not node.unpack and len(node.outputs) > 1:
            yield "G8", where, "several outputs of an operator that returns no sequence"
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
    if min(node.cost.flops, node.cost.bytes) < 0:
        yield "G4", where, "a cost is negative"


def _argument(argument: Argument, made: set[str], callable_below: int, where: str) -> Iterator[_Fault]:
    if _nested(argument) > limits.DEPTH:
        yield "L2", where, f"arguments are nested deeper than {limits.DEPTH}"
        return
    for leaf in leaves(argument):
        if isinstance(leaf, ValueArg) and leaf.name not in made:
            yield "G3", where, f"uses {leaf.name[:80]!r}, which is not made before it"
        elif isinstance(leaf, SubgraphArg) and not 0 <= leaf.index < callable_below:
            yield "G6", where, f"calls subgraph {leaf.index}, which does not stand before it"
        elif isinstance(leaf, DtypeArg | LayoutArg | MemoryFormatArg) and not _WORD.fullmatch(leaf.name):
            yield "G13", where, f"{leaf.name[:80]!r} is not a name of its kind"
        elif isinstance(leaf, DeviceArg) and leaf.name is not None and not _WORD.fullmatch(leaf.name):
            yield "G13", where, f"{leaf.name[:80]!r} is not a device type"


def _nested(argument: Argument) -> int:
    return max((1 + _nested(part) for part in parts(argument)), default=0)
