"""The agreement of a stage's graph with the headers of its weight files (SPEC W7)."""

from collections.abc import Iterable, Iterator, Mapping

from stagepack.errors import Problem
from stagepack.format.dtypes import HEADER_DTYPES, ITEM_SIZE, stored_shape
from stagepack.format.graph import Weight
from stagepack.format.weights import StoredTensor


def check_weights(
    weights: Iterable[Weight], headers: Iterable[tuple[str, Mapping[str, StoredTensor]]], graph_name: str
) -> Iterator[Problem]:
    """Yield the W7 problems of a stage.

    Args:
        weights: the weights of the stage's graph.
        headers: the name of each weight file of the stage, and its tensors by name.
        graph_name: the name of the graph file, for messages.

    Yields:
        One problem for each tensor that two files hold, and for each weight that does not fit its stored tensor.
    """
    stored: dict[str, StoredTensor] = {}
    for file_name, tensors in headers:
        for tensor_name in sorted(stored.keys() & tensors.keys()):
            yield Problem(rule="W7", where=file_name, message=f"{tensor_name[:80]!r} is in another file too")
        stored.update(tensors)
    for weight in weights:
        message = _mismatch(weight, stored.get(weight.stored))
        if message is not None:
            yield Problem(rule="W7", where=graph_name, message=message)


def _mismatch(weight: Weight, tensor: StoredTensor | None) -> str | None:
    """The disagreement of a weight with the stored tensor of its name (None: no file has it), or None if they agree."""
    weight_name = weight.names[0][:80]
    if weight.zeros:
        return None if tensor is None else f"the weight {weight_name!r} is all zeros, but a weight file holds it"
    if tensor is None:
        return f"the weight {weight_name!r} is in none of the stage's weight files"
    if weight.base is None:
        expected = (HEADER_DTYPES[weight.dtype], stored_shape(weight.dtype, weight.shape))
        if (tensor.dtype, tensor.shape) != expected:
            shapes = f"{list(weight.shape)}, its file has {tensor.dtype} {list(tensor.shape)}"
            return f"the weight {weight_name!r} is {weight.dtype} {shapes}"
        return None
    strides = weight.strides or ()
    last_element = weight.offset + sum((size - 1) * stride for size, stride in zip(weight.shape, strides, strict=True))
    needed_bytes = 0 if 0 in weight.shape else (last_element + 1) * ITEM_SIZE[weight.dtype]
    if needed_bytes > tensor.end - tensor.start:
        return f"the view {weight_name!r} ends past the last byte of {weight.base[:80]!r}"
    return None
