"""The tables of a graph while it grows: operators, scopes, contexts, subgraphs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from torch.fx import Node as FxNode

from stagepack.format.graph import Context, Op, Scope, Subgraph
from stagepack.linearize.costs import CostModel
from stagepack.linearize.operators import describe
from stagepack.linearize.symbols import SymbolTable


class Tables:
    """What all nodes of one program share.

    Attributes:
        symbols: the sizes that may change.
        costs: what nodes cost.
        device: the type of the device that the program was captured on.
        subgraphs: the bodies of higher-order operators, those that others use first.
        split_positions: the numbers of the nodes before which ``split_here`` stood.
        weights: the names of the values that stand for weights, by the fully qualified names of these.
    """

    def __init__(self, symbols: SymbolTable, device: str, weights: Mapping[str, str]) -> None:
        self.symbols = symbols
        self.weights = weights
        self.costs = CostModel()
        self.device = device
        self.subgraphs: list[Subgraph] = []
        self.split_positions: list[int] = []
        self._rows: list[Op] = []
        self._ops: dict[Any, int] = {}
        self._scopes: dict[Scope, int] = {}
        self._contexts: dict[Context, int] = {}

    @property
    def ops(self) -> Sequence[Op]:
        """The op table."""
        return self._rows

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """The scope table."""
        return tuple(self._scopes)

    @property
    def contexts(self) -> tuple[Context, ...]:
        """The context table."""
        return tuple(self._contexts)

    def op(self, target: Any) -> int:
        """The index of an operator.

        Raises:
            UnsupportedError: no bundle can hold it.
        """
        if target not in self._ops:
            self._ops[target] = len(self._rows)
            self._rows.append(describe(target))
        return self._ops[target]

    def add_aliases(self, op: int, aliases: Iterable[tuple[int, str]]) -> None:
        """Say that results of an operator, by their numbers, may share memory with what is given to some of its parameters."""
        row = self._rows[op]
        self._rows[op] = replace(row, aliases=tuple(dict.fromkeys((*row.aliases, *aliases))))

    def context(self, context: Context) -> int:
        """The index of a context."""
        return self._contexts.setdefault(context, len(self._contexts))

    def scope(self, node: FxNode) -> int:
        """The index of the module that a node came from."""
        stack = module_stack(node)
        scope = stack[-1] if stack else Scope(path="")
        return self._scopes.setdefault(scope, len(self._scopes))


def module_stack(node: FxNode) -> list[Scope]:
    """The calls of modules in which a node was made, the outermost first."""
    stack = []
    for key, (path, cls) in (node.meta.get("nn_module_stack") or {}).items():
        if path.startswith("_empty_nn_module_stack"):  # torch's mark of a node that no module has made
            return []
        call = key.rpartition("@")[2] if "@" in key else ""
        name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
        stack.append(Scope(path=f"{path}@{call}" if call else path, type=name))
    return stack
