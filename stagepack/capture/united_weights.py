"""Programs that were captured apart from one model: each weight gets one name and one tensor in all of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import GraphModule

from stagepack.capture.model_runs import are_identical
from stagepack.errors import CaptureError
from stagepack.torch_internals import NO_MODULE_PREFIX, wrapped_attributes

_MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)


@dataclass(frozen=True, slots=True)
class _Known:
    """A weight of a program that was read before."""

    program_name: str
    tensor: torch.Tensor


class UnitedWeights:
    """The weights of programs of one model, by their names in it.

    A program of a part of the model, such as its encoder, names its weights as this part does. Where a program that was added before has
    the same bits under the name of the part and these names, the weights and modules get these longer names.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def add(self, name: str, program: ExportedProgram) -> None:
        """Let a program have the names and the tensors of those that were added before; the program is changed."""
        weights = _weights(program)
        prefix = _prefix(name, weights, self._known)
        if prefix:
            _move_modules(program, prefix)
        _rename(program, {weight_name: prefix + weight_name for weight_name in weights}, self._known)
        _add_ties(program, self._known)
        for weight_name, tensor in _weights(program).items():
            self._known.setdefault(weight_name, _Known(name, tensor))


def _weights(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a program; it numbers its constants on its own."""
    targets = [str(spec.target) for spec in program.graph_signature.input_specs if _is_weight(spec.kind)]
    return {target: _tensors_of(program, target)[target] for target in targets}


def _is_weight(kind: InputKind) -> bool:
    return kind in (InputKind.PARAMETER, InputKind.BUFFER)


def _tensors_of(program: ExportedProgram, target: str) -> dict[str, torch.Tensor]:
    """The table of a program that has a weight: buffers that are not persistent are among the constants."""
    tables: tuple[dict[str, torch.Tensor], ...] = (program.state_dict, program.constants)
    for table in tables:
        if target in table:
            return table
    raise CaptureError(f"the exported program has no tensor for its weight {target!r}")


def _prefix(name: str, weights: Mapping[str, torch.Tensor], known: Mapping[str, _Known]) -> str:
    """The path in the model of the part that a program was captured from, with a dot behind it; empty for the model itself."""
    if _fits("", weights, known):
        return ""
    first_name = next(iter(weights), "")
    prefixes = [other.removesuffix(first_name) for other in known if other.endswith(f".{first_name}")]
    # First the part that the program is named after: weights of a few ones and zeros have equal bits in many parts.
    prefixes.sort(key=lambda prefix: not f".{prefix}".endswith(f".{name}."))
    if prefix := next((prefix for prefix in prefixes if _fits(prefix, weights, known)), ""):
        return prefix
    for weight_name, tensor in weights.items():
        other = known.get(weight_name)
        if other is not None and not _are_equal(tensor, other.tensor):
            raise CaptureError(
                f"{name}: expected the weight {weight_name} of {other.program_name} ({_description(other.tensor)}), found other values "
                f"({_description(tensor)}): export programs of one model together, or each .pt2 file as a bundle of its own"
            )
    return ""


def _fits(prefix: str, weights: Mapping[str, torch.Tensor], known: Mapping[str, _Known]) -> bool:
    """Whether all weights of a program are those of other programs, whose names have a prefix."""
    return all(
        prefix + weight_name in known and _are_equal(tensor, known[prefix + weight_name].tensor)
        for weight_name, tensor in weights.items()
    )


def _are_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if type(tensor) is not type(other) or tensor.stride() != other.stride() or tensor.device != other.device:
        return False
    if attributes := wrapped_attributes(tensor):
        return all(_are_equal(getattr(tensor, attribute), getattr(other, attribute)) for attribute in attributes)
    return are_identical(tensor, other)


def _description(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def _view(weight_name: str, tensor: torch.Tensor) -> tuple[object, ...]:
    """What is equal for tied weights; tensors without elements, and those that wrap others, are tied to none."""
    if not tensor.numel() or wrapped_attributes(tensor):
        return (weight_name,)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _rename(program: ExportedProgram, names: Mapping[str, str], known: Mapping[str, _Known]) -> None:
    """Give the weights of a program other names, and the tensors that are known by these names."""
    signature = program.graph_signature
    for table in (program.state_dict, program.constants):
        renamed = {names.get(name, name): tensor for name, tensor in table.items()}
        table.clear()
        table.update({name: known[name].tensor if name in known else tensor for name, tensor in renamed.items()})
    for spec in (
        *(spec for spec in signature.input_specs if _is_weight(spec.kind)),
        *(spec for spec in signature.output_specs if spec.kind in _MUTATIONS),
    ):
        spec.target = names[str(spec.target)]


def _add_ties(program: ExportedProgram, known: Mapping[str, _Known]) -> None:
    """Let a program have all names of its tied weights, as inputs that it does not use: a weight has the same names everywhere (W8)."""
    ties: dict[tuple[object, ...], list[str]] = {}
    for name, entry in known.items():
        ties.setdefault(_view(name, entry.tensor), []).append(name)
    own_names = _weights(program)
    for tied in ties.values():
        present = [name for name in tied if name in own_names]
        if not present:
            continue
        for index, name in enumerate(tied):
            if name not in present:
                following = next((other for other in tied[index:] if other in present), None)
                _add_input(program, name, like=present[0], before=following, after=tied[index - 1])


def _add_input(program: ExportedProgram, name: str, *, like: str, before: str | None, after: str) -> None:
    """Add another name of a weight as an input before another one, or else after one."""
    graph, specs = program.graph, program.graph_signature.input_specs
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    index_of = {spec.target: index for index, spec in enumerate(specs) if _is_weight(spec.kind)}
    known_input = placeholders[index_of[like]]
    if before is None:
        position = index_of[after] + 1
        with graph.inserting_after(placeholders[index_of[after]]):
            added = graph.placeholder(known_input.name)
    else:
        position = index_of[before]
        with graph.inserting_before(placeholders[position]):
            added = graph.placeholder(known_input.name)
    added.target, added.meta = added.name, dict(known_input.meta)
    specs.insert(position, replace(specs[index_of[like]], arg=TensorArgument(name=added.name), target=name))
    table = _tensors_of(program, like)
    table[name] = table[like]


def _move_modules(program: ExportedProgram, prefix: str) -> None:
    """Put a path before the paths of the modules that the nodes of a program came from."""
    for graph_module in program.graph_module.modules():
        for node in graph_module.graph.nodes if isinstance(graph_module, GraphModule) else ():
            stack = node.meta.get("nn_module_stack") or {}
            if any(path.startswith(NO_MODULE_PREFIX) for path, _ in stack.values()):
                continue
            node.meta["nn_module_stack"] = {
                key: (f"{prefix}{path}".removesuffix("."), module_type) for key, (path, module_type) in stack.items()
            }
