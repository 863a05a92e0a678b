"""`torch.export.ExportedProgram` -> `Graph`.

Two things change on the way, and nothing else: regions of grad mode and autocast are opened, so that their nodes
stand in the list and carry the region as their context; and results of several parts get names instead of
``getitem`` nodes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.utils import _pytree as pytree

from stagepack.capture.module_calls import TracedCalls
from stagepack.errors import UnsupportedError
from stagepack.format.graph import Argument, Graph, ValueArg
from stagepack.format.signature import Signature
from stagepack.format.traversal import child_arguments
from stagepack.linearize.body import BodyBuilder, constant
from stagepack.linearize.modules import module_calls
from stagepack.linearize.signature import Leaf, signature_of
from stagepack.linearize.symbols import SymbolTable
from stagepack.linearize.tables import Tables
from stagepack.linearize.tensors import Kind, WeightTable, plain_tensors, weight_table


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearizedProgram:
    """A program as data.

    Attributes:
        graph: the whole model.
        signature: how it is called.
        weights: its weights and where their bytes are.
        split_positions: the numbers of the nodes before which ``split_here`` stood.
        device: the type of the device it was captured on.
    """

    graph: Graph
    signature: Signature
    weights: WeightTable
    split_positions: tuple[int, ...]
    device: str


def linearize_program(
    program: ExportedProgram,
    names: Mapping[str, str],
    forward: Callable[..., Any] | None,
    *,
    traced: TracedCalls | None = None,
    store_zeros: bool = False,
) -> LinearizedProgram:
    """Turn a program into data.

    Args:
        program: any that ``torch.export`` makes.
        names: names for torch's symbols.
        forward: the call of the original model, for its parameters' order and defaults.
        traced: the calls of modules, where the trace was recorded.
        store_zeros: whether persistent buffers of all zeros shall have their bytes in the files.

    Raises:
        UnsupportedError: the program holds something that a bundle cannot hold; it is named.
    """
    program = _without_vmap(program)
    weights = weight_table(_tensors(program), store_zeros=store_zeros)
    symbols = SymbolTable(program.range_constraints, names, _hints(program))
    tables = Tables(symbols, _device(program), weights.values)
    body = BodyBuilder(tables, program.graph_module)
    given = _inputs(program, body)
    body.convert()
    results = _results(program, body)
    calls = tuple(module_calls(body, traced or TracedCalls()))
    graph = Graph(
        symbols=tables.symbols.symbols,
        inputs=tuple(body.inputs),
        weights=weights.weights,
        nodes=tuple(body.nodes),
        outputs=tuple(dict.fromkeys(leaf for leaf in results if isinstance(leaf, str))),
        subgraphs=tuple(tables.subgraphs),
        ops=tuple(tables.ops),
        scopes=tables.scopes,
        contexts=tables.contexts,
        calls=calls,
    )
    signature = signature_of(program, given, results, forward)
    return LinearizedProgram(
        graph=graph,
        signature=signature,
        weights=weights,
        split_positions=tuple(tables.split_positions),
        device=tables.device,
    )


def _without_vmap(program: ExportedProgram) -> ExportedProgram:
    """A program without what ``torch.vmap`` leaves in it: calls that enter and leave levels of torch's interpreter."""
    modules = (module for module in program.graph_module.modules() if isinstance(module, GraphModule))
    targets = (node.target for module in modules for node in module.graph.nodes if node.op == "call_function")
    if any(getattr(target, "__module__", None) == "torch._functorch.predispatch" for target in targets):
        program = program.run_decompositions({})
    return program


def _hints(program: ExportedProgram) -> dict[sympy.Symbol, sympy.Integer]:
    """The sizes of the example by torch's symbols."""
    for node in program.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            for size in value.shape if isinstance(value, torch.Tensor) else (value,):
                if isinstance(size, torch.SymInt):
                    return dict(size.node.shape_env.backed_var_to_val)
    return {}


def _inputs(program: ExportedProgram, body: BodyBuilder) -> list[Leaf]:
    """Name what the program is given: the inputs of the body, and the leaves of the model's call, which are returned."""
    leaves: list[Leaf] = []
    for node, spec in zip(_placeholders(program).values(), program.graph_signature.input_specs, strict=True):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            body.give_weight(node, str(spec.target))
        elif spec.kind != InputKind.USER_INPUT:
            raise UnsupportedError(f"the input {node.name} is a {spec.kind.name}, which a bundle cannot hold")
        elif isinstance(spec.arg, ConstantArgument):
            body.env[node] = constant(spec.arg.value, f"the input {node.name}")
            leaves.append(spec.arg)
        else:
            value = body.value(node.name, node.meta["val"], node)
            body.inputs.append(value)
            body.env[node] = ValueArg(value.name)
            leaves.append(value.name)
    return leaves


def _results(program: ExportedProgram, body: BodyBuilder) -> list[Leaf]:
    """The leaves of the model's result; what a functional program gives back to be written is written here."""
    signature = program.graph_signature
    placeholders = _placeholders(program)
    buffers = {
        str(spec.target): placeholders[spec.arg.name] for spec in signature.input_specs if spec.target is not None
    }
    leaves: list[Leaf] = []
    for given, spec in zip(child_arguments(body.result), signature.output_specs, strict=True):
        if spec.kind == OutputKind.USER_OUTPUT:
            leaves.append(_result(given, spec.arg))
        elif spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
            body.copy_into(buffers[str(spec.target)], given)
        elif spec.kind == OutputKind.USER_INPUT_MUTATION:
            body.copy_into(placeholders[str(spec.target)], given)
        else:
            raise UnsupportedError(f"the output {spec.arg.name} is a {spec.kind.name}, which a bundle cannot hold")
    return leaves


def _result(given: Argument, spec: object) -> Leaf:
    if isinstance(given, ValueArg):
        return given.name
    if isinstance(spec, TensorArgument | SymIntArgument | SymFloatArgument | SymBoolArgument):
        if isinstance(given, None | bool | int | float | str):
            return ConstantArgument(name="", value=given)
        raise UnsupportedError(f"the output {spec.name} is not a value")
    assert isinstance(spec, ConstantArgument)
    return spec


def _placeholders(program: ExportedProgram) -> dict[str, FxNode]:
    return {node.name: node for node in program.graph.nodes if node.op == "placeholder"}


def _tensors(program: ExportedProgram) -> dict[str, tuple[Kind, torch.Tensor]]:
    """The parameters, buffers and constants of a program by fully qualified name, in the model's order."""
    tensors: dict[str, tuple[Kind, torch.Tensor]] = {}
    kind: Kind
    for spec in program.graph_signature.input_specs:
        name = str(spec.target)
        if spec.kind == InputKind.PARAMETER:
            kind, tensor = "parameter", program.state_dict[name]
        elif spec.kind == InputKind.BUFFER and spec.persistent:
            kind, tensor = "buffer", program.state_dict[name]
        elif spec.kind == InputKind.BUFFER:
            kind, tensor = "non_persistent_buffer", _constant_tensor(program, name)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            kind, tensor = "constant", _constant_tensor(program, name)
        else:
            continue
        tensors |= {inner: (kind, plain) for inner, plain in plain_tensors(name, tensor)}
    return tensors


def _constant_tensor(program: ExportedProgram, name: str) -> torch.Tensor:
    held = program.constants[name]
    if not isinstance(held, torch.Tensor):
        raise UnsupportedError(f"the constant {name} is a {type(held).__name__}, which a bundle cannot hold")
    return held


def _device(program: ExportedProgram) -> str:
    """The type of the device that the program was captured on: that of its weights, else of its inputs."""
    held: Iterable[Any] = [tensor for _, tensor in _tensors(program).values()]
    inputs = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    types = [tensor.device.type for tensor in (*held, *inputs) if isinstance(tensor, torch.Tensor)]
    return types[0] if types else "cpu"
