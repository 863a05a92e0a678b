"""The parameters, buffers and constants of a captured program, the device that they are on, and constant arguments of its operators."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import GraphModule

from stagepack.errors import UnsupportedError
from stagepack.format.graph import Argument, ComplexArg, DtypeArg, LayoutArg, MemoryFormatArg
from stagepack.format.limits import is_plain
from stagepack.torch_internals import wrapped_attributes

WeightKind = Literal["parameter", "buffer", "non_persistent_buffer", "constant"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the format: ``float32``."""
    return str(dtype).removeprefix("torch.")


def constant_argument(constant: object, location: str) -> Argument:
    """Return a number, text, bool or None, or a dtype, layout or memory format of torch, as data."""
    if is_plain(constant):
        return constant  # type: ignore[return-value]
    match constant:
        case complex():
            return ComplexArg(constant.real, constant.imag)
        case torch.dtype():
            return DtypeArg(dtype_name(constant))
        case torch.layout():
            return LayoutArg(str(constant).removeprefix("torch."))
        case torch.memory_format():
            return MemoryFormatArg(str(constant).removeprefix("torch."))
    description = repr(constant) if isinstance(constant, int | str) else f"a {type(constant).__name__}"
    raise UnsupportedError(f"{location} is {description}, which a bundle cannot hold")


class ProgramTensors(NamedTuple):
    """The tensors of a captured program."""

    # The parameters, buffers and constants with their kind, in the order of the model.
    tensors: Mapping[str, tuple[WeightKind, torch.Tensor]]
    # The constants that graph modules inside the program hold.
    inner_constants: Mapping[str, torch.Tensor]
    # The type of the device of the capture: the device of the first tensor, else of the first input, else ``cpu``.
    device: str


def program_tensors(program: ExportedProgram) -> ProgramTensors:
    """Return the tensors of a program. In the place of a tensor that wraps others, such as a quantized weight, are those that it wraps."""
    tensors: dict[str, tuple[WeightKind, torch.Tensor]] = {}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    used_names = {node.name for node in placeholders if node.users}
    for spec in program.graph_signature.input_specs:
        kind = _weight_kind(spec)
        if kind is not None:
            weight_name = str(spec.target)
            tensor = (
                program.state_dict[weight_name]
                if kind in ("parameter", "buffer")
                else _constant_tensor(program, weight_name)
            )
            if kind == "non_persistent_buffer" and spec.arg.name not in used_names and tensor.layout != torch.strided:
                continue  # for code outside of the forward, such as whisper's sparse `alignment_heads`
            tensors |= {plain_name: (kind, plain) for plain_name, plain in unwrapped_tensors(weight_name, tensor)}
    inner = _inner_constants(program)
    tensors |= {name: ("constant", tensor) for name, tensor in inner.items()}
    candidates = (*(tensor for _, tensor in tensors.values()), *(node.meta.get("val") for node in placeholders))
    device = next((tensor.device.type for tensor in candidates if isinstance(tensor, torch.Tensor)), "cpu")
    return ProgramTensors(tensors, inner, device)


def _inner_constants(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """The tensors that graph modules inside a program hold, such as constants in the branches of ``torch.cond``.

    torch lifts the constants of the program itself, and names them ``lifted_tensor_0`` and so on. These get the next names.
    """
    taken_names = {*program.constants, *program.state_dict}
    free_names = (f"lifted_tensor_{number}" for number in itertools.count())
    distinct = {id(tensor): tensor for tensor in held_tensors(program.graph_module)}
    names = (name for name in free_names if name not in taken_names)
    return dict(zip(names, distinct.values(), strict=False))


def held_tensors(module: GraphModule) -> Iterator[torch.Tensor]:
    """Yield the tensors that the nodes of a graph module, and of the graph modules that it calls, read as attributes."""
    for node in module.graph.nodes:
        if node.op == "get_attr":
            attribute = module_attribute(module, str(node.target))
            if isinstance(attribute, torch.Tensor):
                yield attribute
            elif isinstance(attribute, GraphModule):
                yield from held_tensors(attribute)


def module_attribute(module: torch.nn.Module, path: str) -> object:
    """Return the attribute of a module at a path, which may lead through modules inside it; None if there is none."""
    attribute: object = module
    for name in path.split("."):
        attribute = getattr(attribute, name, None)
    return attribute


def unwrapped_tensors(weight_name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a weight consists of, with their names: itself, or for a tensor subclass those that it wraps."""
    attributes = wrapped_attributes(tensor)
    if not attributes:
        yield weight_name, tensor
    for attribute in attributes:
        yield from unwrapped_tensors(wrapped_tensor_name(weight_name, attribute), getattr(tensor, attribute))


def wrapped_tensor_name(weight_name: str, attribute: str) -> str:
    """Return the name of the tensor that an attribute of a weight of a tensor subclass holds."""
    return f"{weight_name}.{attribute}"


def _weight_kind(spec: InputSpec) -> WeightKind | None:
    match spec.kind:
        case InputKind.PARAMETER:
            return "parameter"
        case InputKind.BUFFER:
            return "buffer" if spec.persistent else "non_persistent_buffer"
        case InputKind.CONSTANT_TENSOR:
            return "constant"
        case _:
            return None


def _constant_tensor(program: ExportedProgram, weight_name: str) -> torch.Tensor:
    constant = program.constants[weight_name]
    if not isinstance(constant, torch.Tensor):
        raise UnsupportedError(f"the constant {weight_name} is a {type(constant).__name__}, which a bundle cannot hold")
    return constant
