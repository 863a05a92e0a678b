"""Where the recorded cost of a node comes from, told by the name of its operator alone.

No operator is free unless it moves no data. An operator that is in none of the tables of `operator_names` and has no formula has an
estimated cost.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from stagepack.format.graph import Graph
from stagepack.format.operators import operator_namespace
from stagepack.partition.cost_formulas import FLOP_FORMULAS
from stagepack.partition.operator_names import (
    FREE_OPERATORS,
    MEMORY_BOUND_OPERATORS,
    MEMORY_BOUND_PREFIXES,
    TORCH_COUNTED_OPERATORS,
)

CostSource = Literal["free", "memory", "counted", "estimated"]

# Arithmetic on symbolic scalars.
_FREE_NAMESPACES: Final = frozenset({"operator", "math", "torch"})

# Operators that execute a subgraph a known number of times; the nodes of the subgraph have costs of their own.
_CONTROL_FLOW: Final = frozenset(
    f"higher_order.{operator_name}"
    for operator_name in ("associative_scan", "cond", "invoke_subgraph", "map_impl", "scan")
)


def operator_base_name(operator_name: str) -> str:
    """Return the name that the tables have for an operator."""
    namespace, base_name = operator_name.split(".")[:2]
    if not base_name.startswith("__"):
        base_name = base_name.rstrip("_")
    return f"{namespace}.{base_name}"


def cost_source(operator_name: str) -> CostSource:
    """Return where the cost of the nodes that call an operator comes from.

    The result is ``"free"``: it moves no data. ``"counted"``: its floating-point operations are counted, by torch or by a formula.
        ``"memory"``: the bytes that it reads and writes tell its cost. ``"estimated"``: a guess from the shapes.
    """
    base_name = operator_base_name(operator_name)
    if base_name in FREE_OPERATORS or operator_namespace(operator_name) in _FREE_NAMESPACES:
        return "free"
    if base_name in TORCH_COUNTED_OPERATORS or base_name in FLOP_FORMULAS or base_name in _CONTROL_FLOW:
        return "counted"
    if base_name in MEMORY_BOUND_OPERATORS or base_name.startswith(MEMORY_BOUND_PREFIXES):
        return "memory"
    return "estimated"


def estimated_operators(graphs: Iterable[Graph]) -> Mapping[str, int]:
    """Count the nodes whose costs are estimates, by operator.

    The result is the number of nodes of each such operator, by its name; empty when all costs are counted.
    """
    counts: Counter[str] = Counter()
    for graph in graphs:
        estimated = {index: op.name for index, op in enumerate(graph.ops) if cost_source(op.name) == "estimated"}
        nodes = (*graph.nodes, *(node for subgraph in graph.subgraphs for node in subgraph.nodes))
        counts.update(estimated[node.op] for node in nodes if node.op in estimated)
    return dict(sorted(counts.items()))
