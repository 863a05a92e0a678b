"""Compare results with recorded ones."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from stagepack.errors import StagepackError
from stagepack.format.reader import Bundle
from stagepack_loaders.base import ArrayOps

# How far results may be from those that were recorded, perhaps on another device: relative and absolute. Other dtypes must be equal.
TOLERANCE: Final[Mapping[str, tuple[float, float]]] = {
    "float64": (1e-5, 1e-6),
    "float32": (1e-3, 1e-4),
    "float16": (1e-2, 1e-2),
    "bfloat16": (4e-2, 4e-2),
    "complex64": (1e-3, 1e-4),
    "complex128": (1e-5, 1e-6),
}


class ExampleError(StagepackError):
    """A bundle gives other results for its recorded example: it is damaged, or the device computes otherwise."""


class Difference(NamedTuple):
    """How far results are from the expected ones.

    Attributes:
        largest: the largest absolute difference; 0.0 if all elements are equal, infinity if a shape, a dtype or a special value differs.
        within: whether all elements are within the tolerance.
    """

    largest: float
    within: bool


class Tolerance(NamedTuple):
    """How far results may be from the expected ones, in the place of `TOLERANCE`. Integers and booleans must be equal all the same.

    Attributes:
        rtol: the difference allowed relative to each value; None for the default of the dtype.
        atol: the absolute difference that is allowed in addition; None for the default of the dtype.
    """

    rtol: float | None = None
    atol: float | None = None

    def of_dtype(self, dtype: str) -> tuple[float, float]:
        """Return the relative and the absolute tolerance for results of a dtype."""
        if dtype not in TOLERANCE:
            return 0.0, 0.0
        rtol, atol = TOLERANCE[dtype]
        return rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol


def compare_arrays(arrays: ArrayOps, actual: Any, expected: Any, tolerance: Tolerance | None = None) -> Difference:
    """Compare two arrays."""
    dtype = str(expected.dtype).removeprefix("torch.")
    return Difference(*arrays.difference(actual, expected, *(tolerance or Tolerance()).of_dtype(dtype)))


def format_difference(largest: float) -> str:
    """Return the largest difference of results as text."""
    return f"{largest:g}" if math.isfinite(largest) else f"{largest:g} (other shapes, dtypes or special values)"


def check_example_difference(bundle: Bundle, difference: Difference, *, cure: str) -> None:
    """Refuse results of the recorded example that are beyond the tolerance.

    cure: what allows them, for people.
    """
    if not difference.within:
        raise ExampleError(
            f"{bundle.location}: expected the recorded results of the example, found a difference of "
            f"{format_difference(difference.largest)}: the bundle is damaged, or this device computes otherwise ({cure})"
        )


def combine_differences(differences: Iterable[Difference]) -> Difference:
    """Return the difference of several arrays from several; of none from none, it is 0.0."""
    combined = list(differences)
    return Difference(
        max((difference.largest for difference in combined), default=0.0),
        all(difference.within for difference in combined),
    )
