"""Which arguments of a higher-order operator are its subgraphs, and which one lists the operands that it passes to them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from torch.fx import Node as FxNode

from stagepack.errors import UnsupportedError
from stagepack.format.graph import Argument, ListArg, TupleArg
from stagepack.torch_internals import HigherOrderOperator

# The argument whose items are passed to all subgraphs as their last inputs.
_OPERANDS: Final = {"cond": 3, "while_loop": 3, "map_impl": 2, "scan": 3, "associative_scan": 2}
# Of flex_attention: the subgraph of the scores and the last item of the block mask, with the operands of each.
_SCORE_OPERANDS, _MASK_OPERANDS = 7, 8


def subgraph_operands(node: FxNode) -> Iterator[tuple[int | None, list[FxNode]]]:
    """Yield the subgraphs of a call of a higher-order operator that get the same operands.

    It yields the position of the argument that lists the operands, None if all further arguments are operands; and the nodes of the
        subgraphs.
    """
    if not isinstance(node.target, HigherOrderOperator):
        return
    operator_name = node.target.name()
    if operator_name == "flex_attention":
        score, block_mask = node.args[3:5]
        assert isinstance(block_mask, tuple | list)
        for position, argument in ((_SCORE_OPERANDS, score), (_MASK_OPERANDS, block_mask[-1])):
            if isinstance(argument, FxNode):
                yield position, [argument]
    else:
        subgraph_nodes = [
            argument for argument in node.args if isinstance(argument, FxNode) and argument.op == "get_attr"
        ]
        yield _OPERANDS.get(operator_name), subgraph_nodes


def with_operands(
    args: Sequence[Argument], further_operands: Mapping[int | None, Sequence[Argument]]
) -> tuple[Argument, ...]:
    """Return the arguments of a call with further operands."""
    extended = list(args)
    for position, operands in further_operands.items():
        if position is None:
            extended += operands
        elif operands:
            listed = extended[position] if position < len(extended) else None
            if not isinstance(listed, ListArg | TupleArg):
                raise UnsupportedError(
                    "a function that a higher-order operator calls holds a constant: make it a buffer of the module, or an argument"
                )
            extended[position] = type(listed)((*listed.items, *operands))
    return tuple(extended)
