"""The dimension over which requests to a bundle may be joined."""

from collections.abc import Sequence

from stagepack.errors import DigestError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol, format_guard, symbol_names
from stagepack.format.tree import value_names
from stagepack.graph.rows.row_analysis import mixed_rows


def end_edges(bundle: Bundle) -> list[Edge]:
    """Return the edges of the inputs and the results of a bundle."""
    results = set(value_names(bundle.entry_point.signature.result))
    return [edge for edge in bundle.edges if edge.producer is None or edge.name in results]


def batch_dimension(bundle: Bundle, edges: Sequence[Edge]) -> Symbol | str:
    """Find the symbol that is the first dimension of all edges, and no later dimension of any, and whose rows keep apart.

    Numbers that cross from stage to stage have no dimensions: they must not depend on the rows. Reads the graphs of all stages.
    """
    symbol = _shared_symbol(bundle, edges)
    if isinstance(symbol, str):
        return symbol
    try:
        graphs = [bundle.graph(stage_number) for stage_number in range(len(bundle.stages))]
    except DigestError as error:
        if any(problem.rule != "D1" for problem in error.problems):
            raise
        return "this host has not the graphs of all stages, which say whether rows meet"
    row_dims = {edge.name: 0 for edge in edges if edge.producer is None}
    return mixed_rows(graphs, row_dims, [edge.name for edge in edges]) or symbol


def _shared_symbol(bundle: Bundle, edges: Sequence[Edge]) -> Symbol | str:
    """The symbol that is the first dimension of all edges, and no later dimension of any; or why there is none."""
    if any(stage.state for stage in bundle.stages):
        return "the model keeps state between calls"
    symbols = {symbol.name: symbol for symbol in bundle.entry_point.symbols}
    end_names = {edge.name for edge in end_edges(bundle)}
    batch_symbol: Symbol | None = None
    for edge in edges:
        if edge.dtype in SCALAR_DTYPES and edge.name not in end_names:
            continue
        dim = edge.shape[0] if edge.shape and edge.dtype not in SCALAR_DTYPES else None
        if not isinstance(dim, str):
            return f"{edge.name} has no dynamic first dimension"
        if batch_symbol is not None and dim != batch_symbol.name:
            return f"the first dimensions {batch_symbol.name} and {dim} are different"
        batch_symbol = symbols[dim]
    if batch_symbol is None:
        return "the model has no inputs and outputs"
    if any(batch_symbol.name in symbol_names(dim) for edge in edges for dim in edge.shape[1:]):
        return f"{batch_symbol.name} is a later dimension too"
    for guard in bundle.entry_point.guards:
        if batch_symbol.name in {*symbol_names(guard.left), *symbol_names(guard.right)}:
            return f"the model was captured for {format_guard(guard)}"
    return batch_symbol
