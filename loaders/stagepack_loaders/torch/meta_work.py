"""Operators whose work without data grows with the sizes that a graph states, or faster than with their arguments (SPEC G16).

On tensors without memory most operators take microseconds at any size. The operators here make a tensor for each row, each step of a
sequence or each unit of a layer, or search an order of products. A file of a kilobyte may state sizes of 2^62, so they are bounded before
they run.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from stagepack.torch_internals import (
    OperatorOverload,
    operator_schema,
)

Arguments = Mapping[str, Any]
# Tensors that one call makes, besides those that its node states.
MOST_TENSORS: Final = 1024
# Factors of a product: torch tries all orders in time that grows with the third power.
_MOST_FACTORS: Final = 256
# Dimensions of a value (SPEC L1).
_MOST_DIMENSIONS: Final = 64
# How many tensors an operator may take whose work grows faster than their number, and the argument that has them or their number.
_ITEM_LIMITS: Final[Mapping[str, tuple[int, str]]] = {
    "aten.cartesian_prod.default": (_MOST_DIMENSIONS, "tensors"),
    "aten.chain_matmul.default": (_MOST_FACTORS, "matrices"),
    "aten.chain_matmul.out": (_MOST_FACTORS, "matrices"),
    "aten.combinations.default": (_MOST_DIMENSIONS, "r"),
    "aten.linalg_multi_dot.default": (_MOST_FACTORS, "tensors"),
    "aten.linalg_multi_dot.out": (_MOST_FACTORS, "tensors"),
    "aten.meshgrid.default": (_MOST_DIMENSIONS, "tensors"),
    "aten.meshgrid.indexing": (_MOST_DIMENSIONS, "tensors"),
}


class MetaWork(NamedTuple):
    """Whether a call should not be made, and why the graph is refused then; without a reason, the result is only not compared."""

    is_excessive: bool
    reason: str = ""


def meta_work(overload: OperatorOverload, args: Sequence[Any], kwargs: Arguments, stated_count: int) -> MetaWork:
    """Tell whether a call would take long on tensors without memory."""
    operator_name = str(overload)
    if operator_name not in _RESULT_COUNTS and operator_name not in _STEP_COUNTS and operator_name not in _ITEM_LIMITS:
        return MetaWork(is_excessive=False)
    parameters = operator_schema(overload).arguments
    defaults = {parameter.name: parameter.default_value for parameter in parameters}
    positional = {parameter.name: argument for parameter, argument in zip(parameters, args, strict=False)}
    arguments = defaults | positional | dict(kwargs)
    try:
        return _work(operator_name, arguments, stated_count)
    except (AttributeError, LookupError, RuntimeError, TypeError):
        return MetaWork(is_excessive=False)  # the operator refuses these arguments


def _work(operator_name: str, arguments: Arguments, stated_count: int) -> MetaWork:
    if operator_name in _RESULT_COUNTS:
        result_count = _RESULT_COUNTS[operator_name](arguments)
        if result_count > max(stated_count, MOST_TENSORS):
            return MetaWork(
                is_excessive=True,
                reason=f"it states {stated_count} values, the operator returns {result_count}: expected all of them, or at most "
                f"{MOST_TENSORS}",
            )
    if operator_name in _STEP_COUNTS:
        return MetaWork(is_excessive=_STEP_COUNTS[operator_name](arguments) > MOST_TENSORS)
    if operator_name in _ITEM_LIMITS:
        limit, argument_name = _ITEM_LIMITS[operator_name]
        items = arguments[argument_name]
        count = items if isinstance(items, int) else len(items)
        if count > limit:
            return MetaWork(is_excessive=True, reason=f"the operator takes {count} tensors: expected at most {limit}")
    return MetaWork(is_excessive=False)


def _row_count(arguments: Arguments) -> int:
    return int(arguments["self"].size(arguments["dim"]))


def _split_count(arguments: Arguments) -> int:
    row_count, split_size = _row_count(arguments), arguments["split_size"]
    return -(-row_count // split_size) if split_size > 0 else 1


def _chunk_count(arguments: Arguments) -> int:
    row_count = _row_count(arguments)
    chunks: int = arguments["chunks"]
    return min(chunks, row_count) if row_count else chunks


def _section_count(arguments: Arguments) -> int:
    count: int = arguments["sections"]
    return count


def _recurrent_step_count(arguments: Arguments) -> int:
    step_count = int(arguments["input"].size(1 if arguments["batch_first"] else 0))
    layer_count: int = arguments["num_layers"]
    return step_count * layer_count * (2 if arguments["bidirectional"] else 1)


def _bilinear_unit_count(arguments: Arguments) -> int:
    return int(arguments["weight"].size(0))


def _trilinear_unit_count(arguments: Arguments) -> int:
    # torch inserts dimensions into the three tensors, and then loops over one dimension of the result.
    unrolled_dim: int = arguments["unroll_dim"]
    unit_count = 1
    for tensor_name, inserted_name in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        inserted_dims = arguments[inserted_name]
        if unrolled_dim not in inserted_dims:
            own_dim = unrolled_dim - sum(dim < unrolled_dim for dim in inserted_dims)
            unit_count = max(unit_count, int(arguments[tensor_name].size(own_dim)))
    return unit_count


# The number of tensors that an operator returns.
_RESULT_COUNTS: Final[Mapping[str, Callable[[Arguments], int]]] = {
    "aten.chunk.default": _chunk_count,
    "aten.dsplit.int": _section_count,
    "aten.hsplit.int": _section_count,
    "aten.split.Tensor": _split_count,
    "aten.split_copy.Tensor": _split_count,
    "aten.tensor_split.sections": _section_count,
    "aten.unbind.int": _row_count,
    "aten.unbind_copy.int": _row_count,
    "aten.unsafe_chunk.default": _chunk_count,
    "aten.unsafe_split.Tensor": _split_count,
    "aten.vsplit.int": _section_count,
}
# The number of steps of an operator that returns few tensors. Models of long sequences need them: their results are not compared.
_STEP_COUNTS: Final[Mapping[str, Callable[[Arguments], int]]] = {
    "aten._trilinear.default": _trilinear_unit_count,
    "aten.bilinear.default": _bilinear_unit_count,
    "aten.gru.input": _recurrent_step_count,
    "aten.lstm.input": _recurrent_step_count,
    "aten.rnn_relu.input": _recurrent_step_count,
    "aten.rnn_tanh.input": _recurrent_step_count,
}
