"""The tables of a graph while it is built: operators, scopes, contexts, subgraphs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch.fx import Node as FxNode

from stagepack.format.graph import Context, Op, Scope, Subgraph
from stagepack.linearize.costs import CostModel
from stagepack.linearize.operators import op_row
from stagepack.linearize.symbols import SymbolTable
from stagepack.torch_internals import NO_MODULE_PREFIX


class Tables:
    """What all nodes of one program share.

    Attributes:
        symbols: the sizes that may change.
        device: the type of the device that the program was captured on.
        weight_values: the names of the values that stand for weights, by the fully qualified names of the weights.
        constant_names: the fully qualified names of tensors that graph modules hold, by the identity of the tensor.
        costs: the costs of nodes.
        subgraphs: the bodies of higher-order operators; those that others use come first.
        split_positions: the positions of the nodes before which ``split_here`` was called.
        current_node: the fx node of which a node is made at present, for errors.
    """

    def __init__(
        self,
        symbols: SymbolTable,
        device: str,
        weight_values: Mapping[str, str],
        inner_constants: Mapping[str, torch.Tensor],
    ) -> None:
        self.symbols = symbols
        self.device = device
        self.weight_values = weight_values
        self.constant_names = {id(tensor): name for name, tensor in inner_constants.items()}
        self.costs = CostModel()
        self.subgraphs: list[Subgraph] = []
        self.split_positions: list[int] = []
        self.current_node: FxNode | None = None
        self._op_rows: list[Op] = []
        self._op_indices: dict[Any, int] = {}
        self._scope_indices: dict[Scope, int] = {}
        self._context_indices: dict[Context, int] = {}

    @property
    def ops(self) -> Sequence[Op]:
        """The op table."""
        return self._op_rows

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """The scope table."""
        return tuple(self._scope_indices)

    @property
    def contexts(self) -> tuple[Context, ...]:
        """The context table."""
        return tuple(self._context_indices)

    def op_index(self, target: Any) -> int:
        """Return the index of an operator, which is added when it is new."""
        if target not in self._op_indices:
            self._op_indices[target] = len(self._op_rows)
            self._op_rows.append(op_row(target))
        return self._op_indices[target]

    def add_aliases(self, op: int, aliases: Iterable[tuple[int, str]]) -> None:
        """Record that results of an operator may share memory with arguments."""
        row = self._op_rows[op]
        self._op_rows[op] = replace(row, aliases=tuple(dict.fromkeys((*row.aliases, *aliases))))

    def context_index(self, context: Context) -> int:
        """Return the index of a context, which is added when it is new."""
        return self._context_indices.setdefault(context, len(self._context_indices))

    def grad_mode(self, context: int | None) -> bool | None:
        """Return the grad mode in a context; None where no context sets one."""
        contexts = self.contexts
        while context is not None:
            if contexts[context].grad is not None:
                return contexts[context].grad
            context = contexts[context].parent
        return None

    def scope_index(self, node: FxNode) -> int:
        """Return the index of the module that a node came from, which is added when it is new."""
        stack = module_stack(node)
        scope = stack[-1] if stack else Scope(path="")
        return self._scope_indices.setdefault(scope, len(self._scope_indices))


def module_stack(node: FxNode) -> list[Scope]:
    """Return the calls of modules that a node was made in, the outermost first."""
    stack = []
    for call_key, (path, module_type) in (node.meta.get("nn_module_stack") or {}).items():
        if path.startswith(NO_MODULE_PREFIX):
            return []
        occurrence = call_key.rpartition("@")[2] if "@" in call_key else ""
        type_name = (
            module_type if isinstance(module_type, str) else f"{module_type.__module__}.{module_type.__qualname__}"
        )
        stack.append(Scope(path=f"{path}@{occurrence}" if occurrence else path, type=type_name))
    return stack
