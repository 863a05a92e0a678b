"""The agreement of the file of an example with the manifest (SPEC M16)."""

from collections.abc import Iterator, Mapping

from stagepack.errors import Problem
from stagepack.format.dtypes import HEADER_DTYPES, ITEM_SIZE, SCALAR_DTYPES, STORED_AS_BYTES, stored_shape
from stagepack.format.manifest import Edge, EntryPoint
from stagepack.format.shapes import evaluate_dim
from stagepack.format.tree import ValueLeaf, tree_leaves
from stagepack.format.validate.problems import format_names
from stagepack.format.weights import StoredTensor

# How the names in the file of an example begin.
INPUT_PREFIX = "input."
OUTPUT_PREFIX = "output."


def example_edges(entry_point: EntryPoint) -> dict[str, Edge]:
    """Return the inputs and the results of an entry point, by the names of their tensors in the file of its example."""
    edges = {edge.name: edge for edge in entry_point.edges}
    inputs = {INPUT_PREFIX + edge.name: edge for edge in entry_point.inputs}
    return inputs | {
        f"{OUTPUT_PREFIX}{index}": edges[leaf.name]
        for index, leaf in enumerate(tree_leaves(entry_point.signature.result))
        if isinstance(leaf, ValueLeaf)
    }


def check_example(entry_point: EntryPoint, tensors: Mapping[str, StoredTensor]) -> Iterator[Problem]:
    """Yield the problems of the tensors of an example."""
    location = str(entry_point.example)
    edges = example_edges(entry_point)
    if differing := sorted(edges.keys() ^ tensors.keys()):
        message = (
            f"expected a tensor for each input and each result, found {format_names(differing)} missing or too many"
        )
        yield Problem(rule="M16", where=location, message=message)
    sizes = {symbol.name: symbol.example for symbol in entry_point.symbols if symbol.example is not None}
    for tensor_name in sorted(edges.keys() & tensors.keys()):
        if not _has_type_of(tensors[tensor_name], edges[tensor_name], sizes):
            actual_type = f"{tensors[tensor_name].dtype} {list(tensors[tensor_name].shape)}"
            message = f"expected {tensor_name[:80]!r} with the dtype of its edge and the sizes of the example, found {actual_type}"
            yield Problem(rule="M16", where=location, message=message)


def _has_type_of(tensor: StoredTensor, edge: Edge, sizes: Mapping[str, int]) -> bool:
    if edge.dtype in SCALAR_DTYPES:
        return tensor.shape == ()
    item_size = ITEM_SIZE.get(edge.dtype, 1) if edge.dtype in STORED_AS_BYTES else 1
    if tensor.dtype != HEADER_DTYPES.get(edge.dtype) or len(tensor.shape) != max(len(edge.shape), item_size > 1):
        return False
    shape = []
    for dim, actual_size in zip(edge.shape, tensor.shape, strict=False):
        try:
            shape.append(evaluate_dim(dim, sizes))
        except (KeyError, ArithmeticError):
            # It depends on data. The last size of what is stored as bytes is a number of bytes.
            shape.append(actual_size // item_size if len(shape) == len(edge.shape) - 1 else actual_size)
    return tensor.shape == stored_shape(edge.dtype, tuple(shape))
