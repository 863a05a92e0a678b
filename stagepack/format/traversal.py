"""Small questions about graphs that several parts ask."""

from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from stagepack.format.graph import (
    Argument,
    DictArg,
    Graph,
    ListArg,
    ModuleCall,
    Node,
    Op,
    SliceArg,
    SubgraphArg,
    TupleArg,
    ValueArg,
)

_CONTAINERS = frozenset({ListArg, TupleArg, DictArg, SliceArg})


def child_arguments(argument: Argument) -> Iterator[Argument]:
    """Yield the arguments inside a container argument, or nothing."""
    if isinstance(argument, ListArg | TupleArg):
        yield from argument.items
    elif isinstance(argument, DictArg):
        yield from (item for _, item in argument.items)
    elif isinstance(argument, SliceArg):
        yield from (argument.start, argument.stop, argument.step)


def leaf_arguments(argument: Argument) -> Iterator[Argument]:
    """Yield the argument itself, or what its containers hold, at any depth and in order."""
    if isinstance(argument, ListArg | TupleArg | DictArg | SliceArg):
        for part in child_arguments(argument):
            yield from leaf_arguments(part)
    else:
        yield argument


def map_arguments(argument: Argument, function: Callable[[Argument], Argument]) -> Argument:
    """Rebuild an argument with `function` applied to each of its leaves, in the order of `leaf_arguments`.

    Law: ``map_arguments(argument, lambda leaf: leaf) == argument``.
    """
    match argument:
        case ListArg(items) | TupleArg(items):
            return type(argument)(tuple([map_arguments(item, function) for item in items]))
        case DictArg(items):
            return DictArg(tuple([(key, map_arguments(item, function)) for key, item in items]))
        case SliceArg(start, stop, step):
            return SliceArg(*[map_arguments(bound, function) for bound in (start, stop, step)])
        case _:
            return function(argument)


def map_node_arguments(node: Node, function: Callable[[Argument], Argument]) -> Node:
    """Rebuild a node with `function` applied to the leaves of its arguments, in the order of `node_arguments`."""
    return replace(
        node,
        args=tuple([map_arguments(argument, function) for argument in node.args]),
        kwargs=tuple([(key, map_arguments(argument, function)) for key, argument in node.kwargs]),
    )


def node_arguments(node: Node) -> Iterator[Argument]:
    """Yield the leaves of all arguments of a node, positional ones first."""
    for argument in node.args:
        yield from leaf_arguments(argument)
    for _, argument in node.kwargs:
        yield from leaf_arguments(argument)


def input_names(node: Node) -> list[str]:
    """The names of the values that a node is given, with repeats."""
    names: list[str] = []
    for argument in node.args:
        _add_names(argument, names)
    for _, argument in node.kwargs:
        _add_names(argument, names)
    return names


def _add_names(argument: Argument, names: list[str]) -> None:
    kind = type(argument)  # much faster than `leaves`, and every node is asked several times
    if kind is ValueArg:
        names.append(argument.name)  # type: ignore[union-attr, arg-type]
    elif kind in _CONTAINERS:
        for part in child_arguments(argument):
            _add_names(part, names)


def subgraph_indices(node: Node) -> Iterator[int]:
    """Yield the indices of the subgraphs that a node calls."""
    return (argument.index for argument in node_arguments(node) if isinstance(argument, SubgraphArg))


def output_names(node: Node) -> Iterator[str]:
    """Yield the names of the values that a node makes."""
    return (value.name for value in node.outputs if value is not None)


def is_random(graph: Graph, node: Node) -> bool:
    """Whether a node draws random numbers, or a subgraph that it calls."""
    inner = (other for index in subgraph_indices(node) for other in graph.subgraphs[index].nodes)
    return graph.ops[node.op].random or any(is_random(graph, other) for other in inner)


def parameter_argument(node: Node, op: Op, parameter: str) -> Argument:
    """What a node gives to one parameter of its operator; None when it leaves the parameter out."""
    position = op.parameters.index(parameter)
    return node.args[position] if position < len(node.args) else dict(node.kwargs).get(parameter)


def parameter_value_names(node: Node, op: Op, parameter: str) -> Iterator[str]:
    """Yield the names of the values given to one parameter of an operator."""
    return (leaf.name for leaf in leaf_arguments(parameter_argument(node, op, parameter)) if isinstance(leaf, ValueArg))


def sort_module_calls(calls: Iterable[ModuleCall]) -> tuple[ModuleCall, ...]:
    """Calls of modules in the order of their nodes; of those that begin together, the one with most nodes first."""
    return tuple(sorted(calls, key=lambda call: (len(call.first), call.first, -call.nodes, call.path)))


def split_call_path(path: str) -> tuple[str, str]:
    """The path of a call of a module, or the last part of it -> that of the module, and the number of the call: empty for the first."""
    module, mark, number = path.rpartition("@")
    return (module, number) if mark and number.isdecimal() else (path, "")
