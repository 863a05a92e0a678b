"""Custom operators for the rows, in the namespace ``tests``, the package of this module."""

import torch
from torch.library import custom_op


@custom_op("tests::smooth", mutates_args=())
def smooth(x: torch.Tensor, weight: torch.Tensor | None = None, factor: float = 0.5) -> torch.Tensor:
    """A pure operator."""
    return torch.lerp(x, x.mean(-1, keepdim=True), factor) * (1 if weight is None else weight)


@smooth.register_fake
def _(x: torch.Tensor, weight: torch.Tensor | None = None, factor: float = 0.5) -> torch.Tensor:
    return torch.empty_like(x)


@custom_op("tests::remember", mutates_args=("buffer",))
def remember(buffer: torch.Tensor, x: torch.Tensor) -> None:
    """Add to a buffer, and give nothing back."""
    buffer.add_(x.sum(0))


@remember.register_fake
def _(buffer: torch.Tensor, x: torch.Tensor) -> None:
    return None


@custom_op("tests::remember_all", mutates_args=("buffers",))
def remember_all(buffers: list[torch.Tensor], x: torch.Tensor) -> None:
    """Add to several buffers."""
    for buffer in buffers:
        buffer.add_(x.sum(0))


@remember_all.register_fake
def _(buffers: list[torch.Tensor], x: torch.Tensor) -> None:
    return None


@custom_op("tests::step", mutates_args=("count",))
def step(count: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Write a counter, and give two results."""
    count.add_(1)
    return x * count, x.sum(-1)


@step.register_fake
def _(count: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1])


@custom_op("tests::spread", mutates_args=())
def spread(parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
    """A list in, a list out."""
    return [part.sum(0, keepdim=True).repeat(size, 1) for part, size in zip(parts, sizes, strict=True)]


@spread.register_fake
def _(parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
    return [part.new_empty(size, *part.shape[1:]) for part, size in zip(parts, sizes, strict=True)]


@custom_op("tests::moments", mutates_args=())
def moments(x: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two results."""
    return x.mean(dims), x.var(dims)


@moments.register_fake
def _(x: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return x.mean(dims), x.var(dims)
