"""A graph with its costs, and what partitioning derives from both."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Graph
from stagepack.graph.analysis import GraphAnalysis
from stagepack.partition.costs import GraphCosts
from stagepack.partition.recipes import Recipe, recomputation_recipes


@dataclass(frozen=True, eq=False, kw_only=True)
class CostedGraph:
    """The graph of a whole model with its costs; what follows from them is computed at its first use and kept.

    Attributes:
        analysis: of the graph.
        costs: of the graph.
    """

    analysis: GraphAnalysis
    costs: GraphCosts

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.analysis.graph

    @cached_property
    def recipes(self) -> Mapping[str, Recipe]:
        """How to compute the values that are cheaper to compute again than to send, by name."""
        return recomputation_recipes(self.analysis, self.costs)

    @cached_property
    def sent_values(self) -> frozenset[str]:
        """The values that a stage receives when it uses them and does not produce them; symbolic scalars are not counted."""
        return frozenset(
            value.name
            for value in self.analysis.values.values()
            if value.name not in self.recipes and value.dtype not in SCALAR_DTYPES
        )
