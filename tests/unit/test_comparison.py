"""Results against recorded ones: what is equal, what is within the tolerance, and what is not."""

import math
from typing import Any

import numpy
import pytest
import torch

from stagepack_loaders.base import ArrayOps
from stagepack_loaders.comparison import compare_arrays, format_difference
from stagepack_loaders.numpy_arrays import NUMPY_ARRAYS
from stagepack_loaders.torch.arrays import TORCH_ARRAYS

ONE = numpy.array([1.0], "float32")


@pytest.mark.parametrize("arrays", [TORCH_ARRAYS, NUMPY_ARRAYS])
@pytest.mark.parametrize(
    ("actual", "expected", "largest", "within"),
    [
        (ONE, ONE, 0.0, True),
        (ONE + 0.001, ONE, pytest.approx(0.001, rel=1e-3), True),
        (ONE + 0.01, ONE, pytest.approx(0.01, rel=1e-3), False),
        (ONE * math.nan, ONE * math.nan, 0.0, True),
        (ONE * math.nan, ONE, math.inf, False),
        (ONE, ONE * math.nan, math.inf, False),
        (ONE * math.inf, ONE * math.inf, 0.0, True),
        (ONE * math.inf, -ONE * math.inf, math.inf, False),
        (ONE * math.inf, ONE, math.inf, False),
        (ONE, ONE * math.inf, math.inf, False),
        (ONE.astype("float64"), ONE, math.inf, False),
        (numpy.array([1.0, 1.0], "float32"), ONE, math.inf, False),
        (numpy.ones((), "float32"), ONE, math.inf, False),
        (numpy.array([], "float32"), numpy.array([], "float32"), 0.0, True),
        (numpy.array([2**53 + 1], "int64"), numpy.array([2**53], "int64"), 1.0, False),
        (numpy.array([7], "int64"), numpy.array([5], "int64"), 2.0, False),
        (numpy.array([True], "bool"), numpy.array([False], "bool"), 1.0, False),
        (numpy.array([1 + 1j], "complex64"), numpy.array([1 - 1j], "complex64"), pytest.approx(2.0), False),
    ],
)
def test_a_difference_and_whether_it_is_within(
    arrays: ArrayOps, actual: Any, expected: Any, largest: float, within: bool
) -> None:
    if arrays is TORCH_ARRAYS:
        actual, expected = torch.from_numpy(actual), torch.from_numpy(expected)
    difference = compare_arrays(arrays, actual, expected)
    assert difference.largest == largest
    assert difference.within is within


def test_an_infinite_difference_says_what_it_means() -> None:
    assert format_difference(0.25) == "0.25"
    assert format_difference(math.inf) == "inf (other shapes, dtypes or special values)"
