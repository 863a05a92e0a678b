"""Code of models that ``torch.export`` traces wrongly, traced as it is meant."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

from stagepack.capture.recurrent_layers import sequences_of_any_length
from stagepack.torch_internals import FakeTensor

_READ_DATA: Final = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_CHUNK: Final = (torch.chunk, torch.Tensor.chunk)


@contextlib.contextmanager
def traced_as_meant() -> Iterator[None]:
    """Trace what `torch.export` would stop at, or fix to the sizes of the example, within the ``with`` block.

    Recurrent layers take sequences of any length; ``tensor.data`` is ``tensor.detach()``; ``tensor.chunk`` cuts any size into parts.
    """
    with sequences_of_any_length(), _TracedFunctions():
        yield


class _TracedFunctions(TorchFunctionMode):
    """Calls other functions of torch in the place of some, for fake tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], FakeTensor):
            if func == _READ_DATA:
                # What is read from `data` has no origin in the trace.
                return args[0].detach()
            if func in _CHUNK and (parts := _equal_chunks(*args, **(kwargs or {}))) is not None:
                return parts
        return func(*args, **(kwargs or {}))


def _equal_chunks(input: torch.Tensor, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...] | None:
    """The chunks of a dimension that is a multiple of their number; None for others.

    torch rounds the size of a chunk up, and counts the chunks by a division that it cannot prove, so that it fixes the dimension.
    """
    size = input.shape[dim]
    if isinstance(size, int) or not isinstance(chunks, int) or not statically_known_true(size % chunks == 0):
        return None
    return torch.split(input, [size // chunks] * chunks, dim)
