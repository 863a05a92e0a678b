"""Operators whose work without data grows with the sizes that a graph states, or faster than with their arguments (SPEC G16).

On tensors without memory most operators take microseconds at any size. Those here make a tensor for each row, each step of a sequence or
each unit of a layer, or search an order of products. A file of a kilobyte may state sizes of 2^62, so they are bounded before they run.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from stagepack.torch_internals import OperatorOverload, operator_schema

_Arguments = Mapping[str, Any]

# Tensors that one call makes, besides those that its node states.
MOST_TENSORS: Final = 1024
# Factors of a product: torch tries all orders in time that grows with the third power.
_MOST_FACTORS: Final = 256
# Dimensions of a value (SPEC L1).
_MOST_DIMENSIONS: Final = 64


class MetaWork(NamedTuple):
    """What limits a call.

    Attributes:
        is_excessive: whether the call should not be made.
        reason: why the graph is refused; empty if the result is only not compared.
    """

    is_excessive: bool
    reason: str = ""


def meta_work(overload: OperatorOverload, args: Sequence[Any], kwargs: _Arguments, stated_count: int) -> MetaWork:
    """Tell whether a call would take long on tensors without memory."""
    name = str(overload)
    if name not in _RESULT_COUNTS and name not in _STEP_COUNTS and name not in _ITEM_LIMITS:
        return MetaWork(is_excessive=False)
    parameters = operator_schema(overload).arguments
    defaults = {parameter.name: parameter.default_value for parameter in parameters}
    positional = {parameter.name: argument for parameter, argument in zip(parameters, args, strict=False)}
    arguments = defaults | positional | dict(kwargs)
    try:
        return _work(name, arguments, stated_count)
    except (AttributeError, LookupError, RuntimeError, TypeError):
        return MetaWork(is_excessive=False)  # the operator refuses these arguments


def _work(name: str, arguments: _Arguments, stated_count: int) -> MetaWork:
    if name in _RESULT_COUNTS:
        result_count = _RESULT_COUNTS[name](arguments)
        if result_count > max(stated_count, MOST_TENSORS):
            return MetaWork(
                is_excessive=True,
                reason=f"it states {stated_count} values, the operator returns {result_count}: expected all of them, or at most "
                f"{MOST_TENSORS}",
            )
    if name in _STEP_COUNTS:
        return MetaWork(is_excessive=_STEP_COUNTS[name](arguments) > MOST_TENSORS)
    if name in _ITEM_LIMITS:
        limit, item_count = _ITEM_LIMITS[name]
        count = item_count(arguments)
        if count > limit:
            return MetaWork(is_excessive=True, reason=f"the operator takes {count} tensors: expected at most {limit}")
    return MetaWork(is_excessive=False)


def _row_count(arguments: _Arguments) -> int:
    count: int = arguments["self"].size(arguments["dim"])
    return count


def _split_count(arguments: _Arguments) -> int:
    row_count, split_size = _row_count(arguments), arguments["split_size"]
    return -(-row_count // split_size) if split_size > 0 else 1


def _chunk_count(arguments: _Arguments) -> int:
    row_count = _row_count(arguments)
    chunks: int = arguments["chunks"]
    return min(chunks, row_count) if row_count else chunks


def _section_count(arguments: _Arguments) -> int:
    count: int = arguments["sections"]
    return count


def _recurrent_step_count(arguments: _Arguments) -> int:
    step_count: int = arguments["input"].size(1 if arguments["batch_first"] else 0)
    layer_count: int = arguments["num_layers"]
    return step_count * layer_count * (2 if arguments["bidirectional"] else 1)


def _bilinear_unit_count(arguments: _Arguments) -> int:
    unit_count: int = arguments["weight"].size(0)
    return unit_count


def _trilinear_unit_count(arguments: _Arguments) -> int:
    # torch inserts dimensions into the three tensors, and then loops over one dimension of the result.
    unrolled_dim: int = arguments["unroll_dim"]
    unit_count = 1
    for tensor_name, inserted_name in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        inserted_dims = arguments[inserted_name]
        if unrolled_dim not in inserted_dims:
            own_dim = unrolled_dim - sum(dim < unrolled_dim for dim in inserted_dims)
            size: int = arguments[tensor_name].size(own_dim)
            unit_count = max(unit_count, size)
    return unit_count


# The number of tensors that an operator returns.
_RESULT_COUNTS: Final[Mapping[str, Callable[[_Arguments], int]]] = {
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
_STEP_COUNTS: Final[Mapping[str, Callable[[_Arguments], int]]] = {
    "aten._trilinear.default": _trilinear_unit_count,
    "aten.bilinear.default": _bilinear_unit_count,
    "aten.gru.input": _recurrent_step_count,
    "aten.lstm.input": _recurrent_step_count,
    "aten.rnn_relu.input": _recurrent_step_count,
    "aten.rnn_tanh.input": _recurrent_step_count,
}

# How many tensors an operator may take whose work grows faster than their number.
_ITEM_LIMITS: Final[Mapping[str, tuple[int, Callable[[_Arguments], int]]]] = {
    "aten.cartesian_prod.default": (_MOST_DIMENSIONS, lambda arguments: len(arguments["tensors"])),
    "aten.chain_matmul.default": (_MOST_FACTORS, lambda arguments: len(arguments["matrices"])),
    "aten.chain_matmul.out": (_MOST_FACTORS, lambda arguments: len(arguments["matrices"])),
    "aten.combinations.default": (_MOST_DIMENSIONS, lambda arguments: arguments["r"]),
    "aten.linalg_multi_dot.default": (_MOST_FACTORS, lambda arguments: len(arguments["tensors"])),
    "aten.linalg_multi_dot.out": (_MOST_FACTORS, lambda arguments: len(arguments["tensors"])),
    "aten.meshgrid.default": (_MOST_DIMENSIONS, lambda arguments: len(arguments["tensors"])),
    "aten.meshgrid.indexing": (_MOST_DIMENSIONS, lambda arguments: len(arguments["tensors"])),
}
