"""Loaded stages -> the same stages on other devices, with their weights as they are now."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from stagepack.errors import DeviceError
from stagepack.format.operators import needed_permissions
from stagepack.format.reader import Bundle
from stagepack_loaders.base import PrepareOptions
from stagepack_loaders.torch.devices import typed_memory_errors
from stagepack_loaders.torch.prepare import build_code, read_parts
from stagepack_loaders.torch.stage import TorchStage

# The first and the last byte of tensors that overlap, half-open.
_Span = tuple[int, int]


@typed_memory_errors()
def move_stages(bundle: Bundle, stages: Mapping[int, TorchStage], placement: Mapping[int, torch.device]) -> None:
    """Move stages to other devices; see `stagepack_loaders.base.Runtime.move_stages`.

    Tensors that are on one device and share memory share it afterwards, also between stages that are moved to one device.
    """
    options = PrepareOptions(allow_ops=needed_permissions(stage.graph for stage in stages.values()))
    for stage_number, stage in stages.items():
        if reason := stage.reason_to_stay():
            raise DeviceError(f"stage {stage_number} cannot be moved: {reason}: load the bundle again with devices=")
        stage.wait_for_weights()
    # A stage whose graph names a missing device must be found before any is moved.
    codes = {
        stage_number: build_code(
            bundle, stage_number, read_parts(bundle, stage_number, options), placement[stage_number], options
        )
        for stage_number in stages
    }
    for device in dict.fromkeys(placement.values()):
        moved_stages = [stage for stage_number, stage in stages.items() if placement[stage_number] == device]
        tensors = [tensor for stage in moved_stages for tensor in stage.weights()]
        move_tensor = tensor_mover(tensors, [tensor for stage in moved_stages for tensor in stage.state()], device)
        for stage_number, stage in stages.items():
            if placement[stage_number] == device:
                stage.move(codes[stage_number], device, move_tensor)


def tensor_mover(
    tensors: Sequence[torch.Tensor], whole_tensors: Iterable[torch.Tensor], device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that copies tensors to a device, where those that share memory share it again."""
    spans = _overlapping_spans([(tensor, _span(tensor)) for tensor in tensors])
    for tensor in whole_tensors:
        spans[_memory_key(tensor)] = [(0, tensor.untyped_storage().nbytes())]
    chunks: dict[tuple[object, _Span], torch.Tensor] = {}
    # With the tensors themselves, so that no other one gets their identity.
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def move_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            key, (start, end) = _memory_key(tensor), _span(tensor)
            span = next(span for span in spans[key] if span[0] <= start and end <= span[1])
            if (key, span) not in chunks:
                storage = tensor.untyped_storage()
                all_bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                chunks[key, span] = all_bytes[slice(*span)].to(device, copy=True)
            offset = (start - span[0]) // tensor.element_size()
            copied = torch.empty(0, dtype=tensor.dtype, device=device)
            copied.set_(chunks[key, span].untyped_storage(), offset, tensor.size(), tensor.stride())
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            moved[id(tensor)] = tensor, torch.nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
        return moved[id(tensor)][1]

    return move_tensor


def _memory_key(tensor: torch.Tensor) -> object:
    """What tensors have in common that are views of one memory."""
    return (tensor.device, tensor.untyped_storage().data_ptr() or id(tensor))


def _span(tensor: torch.Tensor) -> _Span:
    """The bytes of its memory that a tensor uses."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return start, start + (int(last) + 1) * tensor.element_size()


def _overlapping_spans(tensor_spans: Sequence[tuple[torch.Tensor, _Span]]) -> dict[object, list[_Span]]:
    """The bytes of each memory that tensors use, as spans that do not overlap."""
    spans: dict[object, list[_Span]] = {}
    for tensor, (start, end) in sorted(tensor_spans, key=lambda entry: entry[1]):
        merged = spans.setdefault(_memory_key(tensor), [])
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return spans
