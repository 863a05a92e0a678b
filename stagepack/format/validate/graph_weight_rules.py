"""The rules on the weights of a graph (SPEC G9)."""

import math
from collections.abc import Iterator, Sequence

from stagepack.format import limits
from stagepack.format.dtypes import ITEM_SIZE
from stagepack.format.graph import (
    Weight,
)
from stagepack.format.rules import (
    BrokenRule,
    is_identifier,
    is_tensor_name,
)
from stagepack.format.shapes import is_dense

# Prefixes of the dtypes that have gradients.
_TRAINABLE_PREFIXES = ("float", "bfloat", "complex")


def check_graph_weights(weights: Sequence[Weight], defined: set[str]) -> Iterator[BrokenRule]:
    """Yield the problems of the weights of a graph."""
    seen: set[str] = set()
    for weight in weights:
        location = f"weight {weight.value[:80]}"
        if not is_identifier(weight.value):
            yield "G1", location, "the name is not an identifier"
        if weight.value in defined:
            yield "G2", location, "the name is defined twice"
        defined.add(weight.value)
        if not weight.names or len(set(weight.names)) != len(weight.names) or seen.intersection(weight.names):
            yield "G9", location, "it has no name, or a duplicate one"
        seen.update(weight.names)
        if not all(map(is_tensor_name, weight.names if weight.base is None else (*weight.names, weight.base))):
            yield "G9", location, "a name is empty, too long, or reserved in weight files"
        if weight.dtype not in ITEM_SIZE or (weight.trainable and not weight.dtype.startswith(_TRAINABLE_PREFIXES)):
            yield "G9", location, f"{weight.dtype[:80]!r} is not a dtype of stored tensors, or cannot be trained"
        yield from _check_layout(weight, location)
    if sum(weight.zero_bytes for weight in weights) > limits.ZERO_BYTES:
        yield "L1", "weights", f"expected at most {limits.ZERO_BYTES} bytes of buffers of zeros, such as caches"


def _check_layout(weight: Weight, location: str) -> Iterator[BrokenRule]:
    """Yield the problem of shape, strides and offset, if there is one."""
    layout_sizes = (*weight.shape, *(weight.strides or ()), weight.offset)
    if len(weight.shape) > limits.RANK or not all(
        0 <= layout_size <= limits.TENSOR_ELEMENTS for layout_size in layout_sizes
    ):
        expected = f"expected at most {limits.RANK} dimensions, and sizes, strides and an offset"
        yield "G9", location, f"{expected} from 0 to {limits.TENSOR_ELEMENTS}"
    # A size of 0 counts as 1: torch multiplies the sizes before it, too.
    elif math.prod(size or 1 for size in weight.shape) > limits.TENSOR_ELEMENTS:
        yield "G9", location, f"expected at most {limits.TENSOR_ELEMENTS} elements"
    elif len(weight.shape if weight.strides is None else weight.strides) != len(weight.shape):
        yield "G9", location, "the number of strides differs from the number of dimensions"
    elif weight.base is None and (
        weight.offset or not (weight.strides is None or is_dense(weight.shape, weight.strides))
    ):
        yield "G9", location, "a weight without base has an offset, or strides that leave gaps or overlap"
    elif weight.base is not None and (weight.strides is None or weight.zeros):
        yield "G9", location, "a weight with a base has no strides, or is all zeros"
