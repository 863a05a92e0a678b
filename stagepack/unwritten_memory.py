"""Memory that an operator returns unwritten, and that holds what the process had there before: numbers of other requests.

The operators here return such memory by their definition, and loaders fill it with zeros. Operators that would show memory outside of a
tensor's elements are checked in `stagepack.argument_guards`; ``python -m tools.operators.unwritten_memory`` calls all operators that run
by default, to find others.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from stagepack.torch_internals import OperatorOverload

# Operators whose results are unwritten memory.
ALLOCATING_OPERATORS: Final = frozenset(
    {
        "aten.empty.memory_format",
        "aten.empty_like.default",
        "aten.empty_permuted.default",
        "aten.empty_strided.default",
        "aten.new_empty.default",
        "aten.new_empty_strided.default",
    }
)
# In-place operators that write all elements of their first argument and read no element of it.
_COVERING_OPERATORS: Final = frozenset(
    f"aten.{name}"
    for name in [
        "bernoulli_.Tensor",
        "bernoulli_.float",
        "cauchy_.default",
        "copy_.default",
        "exponential_.default",
        "fill_.Scalar",
        "fill_.Tensor",
        "geometric_.default",
        "log_normal_.default",
        "normal_.default",
        "random_.default",
        "random_.from",
        "random_.to",
        "uniform_.default",
        "zero_.default",
    ]
)


def filled_operator(operator: OperatorOverload) -> Callable[..., Any]:
    """Return a function that calls an allocating operator and fills its result with zeros. Its ``__wrapped__`` is the operator."""

    def call_filled(*args: Any, **kwargs: Any) -> Any:
        result = operator(*args, **kwargs)
        if "strided" in operator.name():
            # Between its elements is memory that no element has, and that `as_strided` shows.
            result.as_strided((memory_extent(result),), (1,)).zero_()
            return result
        return result.zero_()

    call_filled.__wrapped__ = operator  # type: ignore[attr-defined]
    return call_filled


def memory_extent(tensor: Any) -> int:
    """Return the number of elements from the first element of a tensor in memory to the last one, both included; 0 without elements."""
    if not tensor.numel():
        return 0
    last: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1


class Call(NamedTuple):
    """What a call of an operator takes and makes, by the names of values."""

    operator_name: str
    first_argument: str | None  # None if the first argument by position is no value
    inputs: Sequence[str]  # with repeats
    outputs: Iterable[str]


def overwritten_results(calls: Iterable[Call]) -> Iterator[str]:
    """Yield the results of allocating operators that the next call with them writes whole, so that a fill would be lost.

    Results with strides of their own are not among them: this write leaves the memory between their elements.

    calls: in execution order.
    """
    unwritten: set[str] = set()
    for call in calls:
        written = call.first_argument if call.operator_name in _COVERING_OPERATORS else None
        if written in unwritten and call.inputs.count(written) == 1:
            yield written
        unwritten.difference_update(call.inputs)
        if call.operator_name in ALLOCATING_OPERATORS and "strided" not in call.operator_name:
            unwritten.update(call.outputs)
