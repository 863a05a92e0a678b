"""Interpret the graph of a stage: for a runtime that has a function of numpy arrays for each operator.

`refuse_unsupported` and `run_nodes` belong together: `run_nodes` runs every graph that `refuse_unsupported` does not refuse.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
from numpy.lib.stride_tricks import as_strided

from stagepack.errors import OperatorError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Argument, Graph, ListArg, Node, ValueArg, Weight
from stagepack.format.reader import Bundle
from stagepack_loaders.base import Loading
from stagepack_loaders.elements import Array, numpy_dtype
from stagepack_loaders.weight_files import WeightFile, open_weight_files

# Operator name -> its function, a Python function whose parameters have the names and defaults of the schema.
Operators = Mapping[str, Callable[..., Any]]


def refuse_unsupported(bundle: Bundle, stage_number: int, graph: Graph, operators: Operators, title: str) -> None:
    """Refuse a stage that `run_nodes` cannot run. A runtime calls it in `prepare`, before weights are read.

    Refused are: operators without a function; arguments that the function does not take; arguments other than values, numbers, strings,
    None and lists of these; operators that return several values; grad modes and autocast; subgraphs; stages that write buffers.
    """
    unknown_operators = sorted({op.name for op in graph.ops} - operators.keys())
    if unknown_operators:
        reason = f"has no {', '.join(unknown_operators)}"
    elif bundle.stages[stage_number].state:
        reason = "does not write buffers"
    elif graph.subgraphs:
        reason = "does not run subgraphs"
    elif graph.contexts:
        reason = "does not run nodes in a grad mode or autocast"
    else:
        reason = next(_unsupported_calls(graph, operators), "")
    if reason:
        raise OperatorError(f"stage {stage_number}: {title} {reason}: choose another runtime")


def _unsupported_calls(graph: Graph, operators: Operators) -> Iterator[str]:
    """Yield why nodes cannot be run."""
    signatures = [inspect.signature(operators[op.name]) for op in graph.ops]
    for node in graph.nodes:
        operator_name = graph.ops[node.op].name
        arguments = [*node.args, *(argument for _, argument in node.kwargs)]
        if node.unpack:
            yield f"does not run {operator_name}, which returns several values"
        for argument in arguments:
            if not _is_supported(argument):
                yield f"does not run {operator_name} with a {type(argument).__name__}"
        try:
            signatures[node.op].bind(*node.args, **dict(node.kwargs))
        except TypeError as error:
            yield f"does not run {operator_name} with these arguments ({error})"


def _is_supported(argument: Argument) -> bool:
    """Whether `_argument_value` knows an argument."""
    if isinstance(argument, ListArg):
        return all(map(_is_supported, argument.items))
    return argument is None or isinstance(argument, ValueArg | bool | int | float | str)


def run_nodes(graph: Graph, operators: Operators, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Run the nodes of a graph in their order.

    The result is the outputs of the graph, in order. Tensors have the dtypes that the graph states.
    """
    known_values = dict(values)
    for node in graph.nodes:
        result = _call(node, operators[graph.ops[node.op].name], known_values)
        for output in node.outputs:
            if output is not None:
                is_scalar = output.dtype in SCALAR_DTYPES
                known_values[output.name] = result if is_scalar else numpy.asarray(result, numpy_dtype(output.dtype))
    return tuple(known_values[output_name] for output_name in graph.outputs)


def _call(node: Node, function: Callable[..., Any], known_values: Mapping[str, Any]) -> Any:
    """Call the function of a node with its positional and keyword arguments."""
    positional = [_argument_value(argument, known_values) for argument in node.args]
    keywords = {parameter_name: _argument_value(argument, known_values) for parameter_name, argument in node.kwargs}
    return function(*positional, **keywords)


def _argument_value(argument: Argument, known_values: Mapping[str, Any]) -> Any:
    if isinstance(argument, ValueArg):
        return known_values[argument.name]
    if isinstance(argument, ListArg):
        return [_argument_value(item, known_values) for item in argument.items]
    return argument


def map_stored_tensors(bundle: Bundle, stage_number: int, *, verify: bool) -> dict[str, Array]:
    """Return the bytes of each stored tensor of a stage, by name. They stay when the bundle is replaced, removed or written into."""
    weight_files = open_weight_files(bundle, bundle.stages[stage_number].weights, Loading(), verify=verify)
    return stored_tensors(weight_files)


def stored_tensors(weight_files: Mapping[str, WeightFile]) -> dict[str, Array]:
    """Return the bytes of each stored tensor of weight files, by name. They cannot be written."""
    stored: dict[str, Array] = {}
    for weight_file in weight_files.values():
        content = numpy.frombuffer(weight_file.content, numpy.uint8)
        content.flags.writeable = False
        stored.update(
            (stored_name, content[entry.start : entry.end]) for stored_name, entry in weight_file.tensors.items()
        )
    return stored


def read_weight(weight: Weight, stored_tensors: Mapping[str, Array]) -> Array:
    """Return a weight as a read-only array on the bytes of its stored tensor, from `map_stored_tensors`."""
    dtype = numpy_dtype(weight.dtype)
    if weight.zeros:
        zeros = numpy.zeros(weight.shape, dtype)
        zeros.flags.writeable = False
        return zeros
    stored_bytes = stored_tensors[weight.stored]
    if weight.base is None:
        return stored_bytes.view(dtype).reshape(weight.shape)
    elements = stored_bytes[: stored_bytes.size - stored_bytes.size % dtype.itemsize].view(dtype)[weight.offset :]
    strides = [stride * dtype.itemsize for stride in weight.strides or ()]
    return as_strided(elements, weight.shape, strides, writeable=False)
