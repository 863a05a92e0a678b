"""Whether a model keeps the rows of a batch apart, decided from its graphs.

Each value is followed from the inputs: which of its dimensions holds the rows. An operator keeps rows apart if each row of its results
depends on the same row of its arguments, and neither on other rows, nor on the number of rows, nor on the place of the row. An operator
that is not known to do so lets them meet. Values that have no rows are the same for all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from stagepack.format.graph import Argument, Graph, Node, SubgraphArg, Value, ValueArg
from stagepack.format.traversal import argument_value_names, child_arguments, input_names, subgraph_indices
from stagepack.graph.rows.call import NodeCall, Tracked
from stagepack.graph.rows.layout import ALONG, PAIRS, UNKNOWN, Rows, RowsMeetError, SizePoints, counts_rows, product
from stagepack.graph.rows.lookups import batch_norm, batch_statistics
from stagepack.graph.rows.operator_rules import METADATA, OVERLOADS, POSITION_RULES, RULES
from stagepack.graph.rows.rearrangement import sliced

# Parameters that switch the randomness of an operator off.
_TRAINING: Final = ("train", "training")
_PROBABILITIES: Final = ("p", "dropout_p", "dropout")


def mixed_rows(
    graphs: Sequence[Graph], row_dims: Mapping[str, int], results: Iterable[str], *, allow_random: bool = False
) -> str | None:
    """Say why rows of a batch do not keep apart in a model, or return None if they do."""
    result_rows = find_rows(graphs, row_dims, results, allow_random=allow_random)
    return result_rows if isinstance(result_rows, str) else None


def find_rows(
    graphs: Sequence[Graph],
    row_dims: Mapping[str, int],
    results: Iterable[str],
    *,
    allow_random: bool = False,
    allow_batch_norm: bool = False,
) -> dict[str, Rows | None] | str:
    """Find the rows of a batch in the results of a model that keeps them apart.

    graphs: the graphs of the stages, in order; or the graph of the whole model.
    row_dims: for each input of the model that holds rows, by its name, the dimension that holds them. Its size is the same in all: a
        symbol, or a number.
    allow_random: whether random operators, each row of whose results depends on its place in the batch, are not a reason.
    """
    inputs = {value.name: value for graph in graphs for value in graph.inputs}
    sizes = {inputs[name].shape[dim] for name, dim in row_dims.items() if name in inputs}
    if len(sizes) > 1:
        return "the inputs have different numbers of rows"
    if not sizes:
        return {}
    symbols = dict.fromkeys(symbol.name for graph in graphs for symbol in graph.symbols)
    analysis = _Analysis(SizePoints(symbols, sizes.pop()), allow_random=allow_random, allow_batch_norm=allow_batch_norm)
    for graph in graphs:
        reason = analysis.follow_graph(graph, row_dims)
        if reason is not None:
            return reason
    result_rows = {
        result_name: analysis.values[result_name].rows for result_name in results if result_name in analysis.values
    }
    for result_name, rows in result_rows.items():
        if analysis.values[result_name].counts_rows:
            return f"{result_name} depends on the number of rows"
        if rows is not None and rows.step is not None:
            return f"{result_name} numbers the rows"
    return result_rows


class _NodeError(Exception):
    """A node lets rows meet; the text is the whole reason."""


class _Analysis:
    """The values of a model, by name, as far as they were followed."""

    def __init__(self, points: SizePoints, *, allow_random: bool, allow_batch_norm: bool) -> None:
        self.values: dict[str, Tracked] = {}
        self.points = points
        self.allow_random = allow_random
        self.allow_batch_norm = allow_batch_norm
        self._followed: dict[tuple[int, int, tuple[Tracked, ...]], list[Tracked | None]] = {}

    def follow_graph(self, graph: Graph, row_dims: Mapping[str, int]) -> str | None:
        """Follow the rows through a graph; values that earlier graphs made are known."""
        try:
            for value in graph.inputs:
                if value.name not in self.values:
                    rows = Rows(row_dims[value.name]) if value.name in row_dims else None
                    self.values[value.name] = self.tracked(value, rows, depends=False)
            for weight in graph.weights:
                self.values[weight.value] = Tracked(weight.dtype, self.points.shape(weight.shape))
            _Body(self, graph, self.values).follow(graph.nodes)
        except _NodeError as error:
            return str(error)
        except RowsMeetError as error:
            return f"an input {error}"
        return None

    def tracked(self, value: Value, rows: Rows | None, *, depends: bool) -> Tracked:
        """What is known of a value with these rows; a scalar whose number is not known depends on that of the rows, or does not."""
        if value.dtype.startswith("sym"):
            number = None if value.expr is None else self.points.size(value.expr)
            counts = depends if number is None else counts_rows(number)
            return Tracked(value.dtype, number=number, counts_rows=counts)
        shape = self.points.shape(value.shape)
        _check_sizes(shape, rows, self.points)
        return Tracked(value.dtype, shape, rows)

    def follow_subgraph(self, graph: Graph, index: int, arguments: Sequence[Tracked]) -> list[Tracked | None]:
        """The results of a subgraph; None for a constant."""
        key = (id(graph), index, tuple(arguments))
        if key not in self._followed:
            subgraph = graph.subgraphs[index]
            if len(arguments) != len(subgraph.inputs):
                raise RowsMeetError(UNKNOWN)
            values = {value.name: argument for value, argument in zip(subgraph.inputs, arguments, strict=True)}
            _Body(self, graph, values).follow(subgraph.nodes)
            items = (
                [subgraph.result] if isinstance(subgraph.result, ValueArg) else list(child_arguments(subgraph.result))
            )
            self._followed[key] = [values.get(item.name) if isinstance(item, ValueArg) else None for item in items]
        return self._followed[key]


def _check_sizes(shape: Sequence[tuple[int, ...]], rows: Rows | None, points: SizePoints) -> None:
    """Raise RowsMeetError if the sizes of a result are not those that its rows need."""
    if rows is not None and (
        rows.dim >= len(shape) or shape[rows.dim] != product((rows.before, points.rows, rows.after))
    ):
        raise RowsMeetError("changes the number of rows")
    if any(counts_rows(size) for dim, size in enumerate(shape) if rows is None or dim != rows.dim):
        raise RowsMeetError("makes a value whose size depends on the number of rows in another way")


class _Body:
    """The nodes of a graph or a subgraph, followed one after the other."""

    def __init__(self, analysis: _Analysis, graph: Graph, values: dict[str, Tracked]) -> None:
        self._analysis, self._graph, self._values = analysis, graph, values
        self._points = analysis.points

    def follow(self, nodes: Iterable[Node]) -> None:
        """Follow the rows through nodes."""
        for node in nodes:
            try:
                self._follow_node(node)
            except (ArithmeticError, LookupError, RowsMeetError, TypeError, ValueError) as error:
                # Other errors: arguments that the operator does not take. Graphs are not compared with the schemas of torch here.
                effect = error if isinstance(error, RowsMeetError) else UNKNOWN
                op = self._graph.ops[node.op].name
                path = self._graph.scopes[node.scope].path if self._graph.scopes else ""
                raise _NodeError(f"{op}{f' in {path}' if path else ''} {effect}") from None

    def _follow_node(self, node: Node) -> None:
        op = self._graph.ops[node.op]
        arguments = [self._values[name] for name in input_names(node) if name in self._values]
        if op.name.startswith("higher_order."):
            results = self._follow_higher_order(op.name, node)
        elif not op.schema:
            results = [None] * len(node.outputs)  # arithmetic on sizes
        else:
            results = list(self._operator_rows(NodeCall(op, node, self._values, self._points), arguments))
        for value, rows in zip(node.outputs, results, strict=True):
            if value is not None:
                depends = any(argument.varies for argument in arguments)
                self._values[value.name] = self._analysis.tracked(value, rows, depends=depends)

    def _operator_rows(self, call: NodeCall, arguments: Sequence[Tracked]) -> Sequence[Rows | None]:
        """The rows of each result of an operator."""
        if call.op.random and not self._analysis.allow_random and not _draws_nothing(call):
            raise RowsMeetError("draws random numbers, which differ by the place of a row")
        if call.name in METADATA:
            return [None] * len(call.outputs)
        has_rows = any(value.varies for value in arguments)
        rule = OVERLOADS[call.op.name] if call.op.name in OVERLOADS else RULES.get(call.name)
        if rule is None:
            if has_rows:
                raise RowsMeetError(UNKNOWN)
            return [None] * len(call.outputs)
        if rule not in POSITION_RULES and any(value.rows and value.rows.step is not None for value in arguments):
            raise RowsMeetError("uses the places of rows in the batch")
        call.need_few_numbers({"start"} if rule is sliced else set())
        if not has_rows:
            return [None] * len(call.outputs)
        rows = batch_statistics(call) if rule is batch_norm and self._analysis.allow_batch_norm else rule(call)
        results = rows if isinstance(rows, list) else [rows] * len(call.outputs)
        for parameter in call.op.mutates:
            if any(value.rows != results[0] for value in call.tensors(parameter)):
                raise RowsMeetError("writes rows into a value that has other ones")
        return results

    def _follow_higher_order(self, name: str, node: Node) -> list[Rows | None]:
        """The rows of each result of an operator that calls subgraphs."""
        handler = {
            "higher_order.cond": self._follow_cond,
            "higher_order.map_impl": self._follow_map,
            "higher_order.scan": self._follow_scan,
            "higher_order.while_loop": self._follow_loop,
            "higher_order.invoke_subgraph": self._follow_call,
        }.get(name)
        if handler is not None:
            results = handler(node)
            if len(results) != len(node.outputs):
                raise RowsMeetError(UNKNOWN)
            return [value.rows if value is not None else None for value in results]
        inner_nodes = (inner for index in subgraph_indices(node) for inner in self._graph.subgraphs[index].nodes)
        is_random = any(self._graph.ops[inner.op].random for inner in inner_nodes)
        if is_random or any(self._values[used].varies for used in input_names(node) if used in self._values):
            raise RowsMeetError(UNKNOWN)
        return [None] * len(node.outputs)

    def _follow_cond(self, node: Node) -> list[Tracked | None]:
        condition, first, second, operands = node.args[:4]
        if any(value.varies for value in self._tracked(condition)):
            raise RowsMeetError("chooses one branch for all rows")
        results = [self._call(branch, self._tracked(operands)) for branch in (first, second)]
        if [value and value.rows for value in results[0]] != [value and value.rows for value in results[1]]:
            raise RowsMeetError("has its rows at other places in each branch")
        return results[0]

    def _follow_loop(self, node: Node) -> list[Tracked | None]:
        condition, body, carried, shared = node.args[:4]
        state, shared_values = self._tracked(carried), self._tracked(shared)
        conditions = self._call(condition, [*state, *shared_values])
        if any(value is None or value.varies for value in conditions):
            raise RowsMeetError("repeats its body for all rows as often as for one of them")
        results = self._call(body, [*state, *shared_values])
        if [value and value.rows for value in results] != [value.rows for value in state]:
            raise RowsMeetError("moves its rows in each repetition")
        return results

    def _follow_map(self, node: Node) -> list[Tracked | None]:
        body, mapped, shared = node.args[:3]
        items = [_without_first(value) for value in self._tracked(mapped)]
        over_rows = [value.rows for value in self._tracked(mapped) if value.rows is not None and value.rows.dim == 0]
        if over_rows and any(value.rows != over_rows[0] for value in self._tracked(mapped)):
            raise RowsMeetError(PAIRS)
        results = self._call(body, [*items, *self._tracked(shared)])
        if over_rows and any(value is not None and value.rows is not None for value in results):
            raise RowsMeetError(PAIRS)
        return [value and _with_first(value, over_rows[0] if over_rows else None) for value in results]

    def _follow_scan(self, node: Node) -> list[Tracked | None]:
        body, initial, scanned, shared = node.args[:4]
        state = self._tracked(initial)
        if any(value.rows is not None and value.rows.dim == 0 for value in self._tracked(scanned)):
            raise RowsMeetError(ALONG)
        items = [_without_first(value) for value in self._tracked(scanned)]
        results = self._call(body, [*state, *items, *self._tracked(shared)])
        if [value and value.rows for value in results[: len(state)]] != [value.rows for value in state]:
            raise RowsMeetError("moves its rows in each repetition")
        return [*results[: len(state)], *[value and _with_first(value, None) for value in results[len(state) :]]]

    def _follow_call(self, node: Node) -> list[Tracked | None]:
        body = next((argument for argument in node.args if isinstance(argument, SubgraphArg)), None)
        return self._call(body, [value for argument in node.args for value in self._tracked(argument)])

    def _call(self, body: Argument, arguments: Sequence[Tracked]) -> list[Tracked | None]:
        if not isinstance(body, SubgraphArg):
            raise RowsMeetError(UNKNOWN)
        return self._analysis.follow_subgraph(self._graph, body.index, arguments)

    def _tracked(self, argument: Argument) -> list[Tracked]:
        return [self._values[name] for name in argument_value_names(argument) if name in self._values]


def _without_first(value: Tracked) -> Tracked:
    """One item along dimension 0 of a value."""
    rows = None if value.rows is None or value.rows.dim == 0 else value.rows.at(value.rows.dim - 1)
    return value._replace(shape=value.shape[1:], rows=rows)


def _with_first(value: Tracked, over_rows: Rows | None) -> Tracked:
    """A value of which each item along a new dimension 0 was computed."""
    return value._replace(rows=over_rows or (value.rows and value.rows.at(value.rows.dim + 1)))


def _draws_nothing(call: NodeCall) -> bool:
    """Whether the arguments of a random operator switch its randomness off."""
    switches = [call.option(parameter) for parameter in _TRAINING if call.has_parameter(parameter)]
    chances = [call.option(parameter) for parameter in _PROBABILITIES if call.has_parameter(parameter)]
    return False in switches or any(chance == 0 for chance in chances if chance is not None)
