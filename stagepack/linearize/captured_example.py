"""The example of a captured model: its inputs as tensors, and the answer of the model, with which the answer of the stages is compared."""

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from msgspec.structs import replace

from stagepack.capture.inputs import Inputs
from stagepack.capture.model_runs import run_model
from stagepack.capture.program_run import InterpretedProgram
from stagepack.capture.programs import Capture
from stagepack.errors import CaptureError, InputError
from stagepack.format.contract import bind_call, check_values
from stagepack.format.tree import ValueLeaf, flatten_tree, leaves_of_tree
from stagepack.format.weights import TensorSpec
from stagepack.format.writer import TensorSource
from stagepack.linearize.program import LinearizedProgram
from stagepack.linearize.program_tensors import dtype_name
from stagepack.linearize.weight_table import tensor_bytes

INPUT_PREFIX, OUTPUT_PREFIX = "input.", "output."


def example_values(capture: Capture, program: LinearizedProgram) -> dict[str, Any]:
    """Return the tensors and numbers that the program takes in its example, by name, in the order of its inputs."""
    bound = bind_call(program.signature, capture.inputs.args, capture.inputs.kwargs)
    return {value.name: bound[value.name].value for value in program.graph.inputs}


def with_example_sizes(capture: Capture, program: LinearizedProgram) -> LinearizedProgram:
    """Return a program whose symbols have the sizes of the example, where they were traced with another one."""
    bound = bind_call(program.signature, capture.inputs.args, capture.inputs.kwargs)
    sizes = check_values(program.graph.inputs, bound, (), program.guards)
    symbols = [replace(symbol, example=sizes.get(symbol.name, symbol.example)) for symbol in program.graph.symbols]
    return dataclasses.replace(program, graph=replace(program.graph, symbols=tuple(symbols)))


def check_captured_example(capture: Capture, program: LinearizedProgram) -> None:
    """Check the example of a captured program as a call of its bundle is checked."""
    bound = bind_call(program.signature, capture.inputs.args, capture.inputs.kwargs)
    check_values(program.graph.inputs, bound, program.graph.symbols, program.guards)


def recorded_inputs(capture: Capture, program: LinearizedProgram) -> dict[str, torch.Tensor]:
    """Return copies of the inputs of the example by name, as they are in memory; numbers are 0-dimensional tensors."""
    bound = bind_call(program.signature, capture.inputs.args, capture.inputs.kwargs)
    return {name: copy.deepcopy(torch.as_tensor(argument.value).detach()) for name, argument in bound.items()}


def run_example(
    capture: Capture, program: LinearizedProgram, written: Iterable[torch.Tensor] = (), changed: list[str] | None = None
) -> dict[str, torch.Tensor]:
    """Run the original model once on its example. The model and its inputs stay as they are."""
    result_tree = program.signature.result
    if capture.model is None:
        inputs = Inputs(args=tuple(example_values(capture, program).values()))
        results = run_model(InterpretedProgram(capture.program), inputs, written=written)
        named = zip(program.result_leaves, results, strict=True)
        value_of = {leaf: result for leaf, result in named if isinstance(leaf, str)}
        leaves = leaves_of_tree(result_tree)
        return _answer_tensors((leaf, value_of[leaf.name] if isinstance(leaf, ValueLeaf) else None) for leaf in leaves)
    answer = run_model(capture.model, capture.inputs, written=written, changed=changed)
    try:
        results = [(leaf, value) for _, leaf, value in flatten_tree(result_tree, answer, "the answer")]
    except InputError as error:
        message = f"the model does not answer as the captured program does: {error}"
        raise CaptureError(f"{message}: fix what the model returns, for example by use_cache=False") from error
    return _answer_tensors(results)


def _answer_tensors(results: Iterable[tuple[Any, Any]]) -> dict[str, torch.Tensor]:
    return {
        f"{OUTPUT_PREFIX}{index}": torch.as_tensor(value).detach().cpu()
        for index, (leaf, value) in enumerate(results)
        if isinstance(leaf, ValueLeaf)
    }


def tensor_source(tensors: Mapping[str, torch.Tensor]) -> TensorSource:
    """Return tensors as the content of a file."""
    # The bytes of a lazy conjugate or negative are other numbers.
    contiguous = {
        tensor_name: tensor.detach().contiguous().resolve_conj().resolve_neg()
        for tensor_name, tensor in tensors.items()
    }
    specs = {
        tensor_name: TensorSpec(name=tensor_name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
        for tensor_name, tensor in contiguous.items()
    }
    return TensorSource(specs=specs, read=lambda tensor_name: [tensor_bytes(contiguous[tensor_name])])
