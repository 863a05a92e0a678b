"""Traversal of graphs: the arguments of a node, the values that it uses and defines, and module calls."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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
    Subgraph,
    SubgraphArg,
    TupleArg,
    Value,
    ValueArg,
)

_CONTAINER_TYPES = frozenset({ListArg, TupleArg, DictArg, SliceArg})


def child_arguments(argument: Argument) -> Sequence[Argument]:
    """Return the arguments directly inside a container; nothing for a leaf."""
    if isinstance(argument, (ListArg, TupleArg)):  # a union of types is made anew by each call
        return argument.items
    if isinstance(argument, DictArg):
        return [item for _, item in argument.items]
    if isinstance(argument, SliceArg):
        return argument.start, argument.stop, argument.step
    return ()


def leaf_arguments(argument: Argument) -> Iterator[Argument]:
    """Yield the leaves of an argument from left to right: the argument itself if it is not a container."""
    if type(argument) in _CONTAINER_TYPES:
        for child in child_arguments(argument):
            yield from leaf_arguments(child)
    else:
        yield argument


def map_arguments(argument: Argument, function: Callable[[Argument], Argument]) -> Argument:
    """Return an argument with its leaves replaced; the containers stay.

    Law: ``map_arguments(argument, lambda leaf: leaf) == argument``.
    """
    if type(argument) in _CONTAINER_TYPES:  # few arguments are
        match argument:
            case ListArg(items) | TupleArg(items):
                return type(argument)(tuple([map_arguments(item, function) for item in items]))
            case DictArg(items):
                return DictArg(tuple([(key, map_arguments(item, function)) for key, item in items]))
            case SliceArg(start, stop, step):
                return SliceArg(*[map_arguments(bound, function) for bound in (start, stop, step)])
    return function(argument)


def map_node_arguments(node: Node, function: Callable[[Argument], Argument]) -> Node:
    """Return a node with the leaves of its arguments replaced, as by `map_arguments`."""
    return replace(
        node,
        args=tuple([map_arguments(argument, function) for argument in node.args]),
        kwargs=tuple([(key, map_arguments(argument, function)) for key, argument in node.kwargs]),
    )


def node_arguments(node: Node) -> Iterator[Argument]:
    """Yield the leaves of all arguments of a node, the positional arguments first."""
    for argument in node.args:
        yield from leaf_arguments(argument)
    for _, argument in node.kwargs:
        yield from leaf_arguments(argument)


def input_names(node: Node) -> list[str]:
    """Return the names of the values that a node uses, in the order of its arguments and with repeats."""
    used_names: list[str] = []
    for argument in node.args:
        if type(argument) is ValueArg:  # most are, and each pass over a graph is here for each node
            used_names.append(argument.name)
        else:
            _add_names(argument, used_names)
    for _, argument in node.kwargs:
        _add_names(argument, used_names)
    return used_names


def _add_names(argument: Argument, used_names: list[str]) -> None:
    # Much faster than `leaf_arguments`.
    argument_type = type(argument)
    if argument_type is ValueArg:
        used_names.append(argument.name)  # type: ignore[union-attr, arg-type]
    elif argument_type in _CONTAINER_TYPES:
        for child in child_arguments(argument):
            _add_names(child, used_names)


def body_values(body: Graph | Subgraph) -> Iterator[Value]:
    """Yield the inputs of a graph or a subgraph, and the values that its nodes define."""
    yield from body.inputs
    yield from (value for node in body.nodes for value in node.outputs if value is not None)


def all_values(graph: Graph) -> Iterator[Value]:
    """Yield all values of a graph and its subgraphs that are not weights."""
    yield from body_values(graph)
    for subgraph in graph.subgraphs:
        yield from body_values(subgraph)


def subgraph_indices(node: Node) -> Iterator[int]:
    """Yield the indices of the subgraphs that a node calls."""
    return (argument.index for argument in node_arguments(node) if isinstance(argument, SubgraphArg))


def output_names(node: Node) -> Iterator[str]:
    """Yield the names of the values that a node defines."""
    return (value.name for value in node.outputs if value is not None)


def random_nodes(graph: Graph) -> frozenset[int]:
    """Return the numbers of the nodes that draw from a random generator, themselves or in a subgraph that they call."""
    random_subgraphs: set[int] = set()

    def is_random(node: Node) -> bool:
        calls_random = bool(random_subgraphs) and not random_subgraphs.isdisjoint(subgraph_indices(node))
        return calls_random or graph.ops[node.op].random

    # A subgraph calls only those before it (SPEC G6).
    for subgraph_index, subgraph in enumerate(graph.subgraphs):
        if any(map(is_random, subgraph.nodes)):
            random_subgraphs.add(subgraph_index)
    return frozenset(node_number for node_number, node in enumerate(graph.nodes) if is_random(node))


def parameter_argument(node: Node, op: Op, parameter: str) -> Argument:
    """Return the argument that a node passes to one parameter of its operator."""
    position = op.parameters.index(parameter)
    if position < len(node.args):
        return node.args[position]
    return next((argument for keyword, argument in node.kwargs if keyword == parameter), None)


def passed_arguments(node: Node, op: Op) -> Iterator[tuple[str, Argument]]:
    """Yield each argument that a node passes, with the name of its parameter.

    To look at several parameters, pass over this once: operators and nodes may have as many of them as fit into a file.
    """
    yield from zip(op.parameters, node.args, strict=False)
    yield from node.kwargs


def argument_value_names(argument: Argument) -> list[str]:
    """Return the names of the values in an argument, from left to right and with repeats."""
    value_names: list[str] = []
    _add_names(argument, value_names)
    return value_names


def sort_module_calls(calls: Iterable[ModuleCall]) -> tuple[ModuleCall, ...]:
    """Sort module calls by their first node; of several that begin together, the one with the most nodes is first."""
    return tuple(sorted(calls, key=lambda call: (len(call.first), call.first, -call.nodes, call.path)))


def with_scopes(nodes: Iterable[Node], new_scopes: Sequence[int] | Mapping[int, int]) -> tuple[Node, ...]:
    """Return nodes that refer to scopes by their new indices."""
    return tuple([replace(node, scope=new_scopes[node.scope]) for node in nodes])


def subgraphs_with_scopes(
    subgraphs: Iterable[Subgraph], new_scopes: Sequence[int] | Mapping[int, int]
) -> tuple[Subgraph, ...]:
    """Return subgraphs whose nodes refer to scopes by their new indices."""
    return tuple([replace(subgraph, nodes=with_scopes(subgraph.nodes, new_scopes)) for subgraph in subgraphs])
