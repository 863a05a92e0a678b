"""What the rows are built of: a module made of a function, and the decorator that makes a case of a builder."""

from collections.abc import Callable, Collection
from typing import Any

import torch

from stagepack.capture.inputs import Inputs
from tests.zoo.case import Build, Case

Model = tuple[torch.nn.Module, Inputs]


class Lambda(torch.nn.Module):
    """A module made of a function, with layers and buffers that hang on it."""

    def __init__(self, function: Callable[..., Any], **held: torch.nn.Module | torch.Tensor) -> None:
        super().__init__()
        for name, value in held.items():
            if isinstance(value, torch.nn.Parameter | torch.nn.Module):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def linear(size: int = 4) -> torch.nn.Linear:
    """A square layer."""
    return torch.nn.Linear(size, size)


def linears(names: str) -> dict[str, torch.nn.Linear]:
    """A square layer for each letter."""
    return {name: linear() for name in names}


def given(*args: Any, dynamic: tuple[Any, ...] | None = None) -> Inputs:
    """Inputs of a `Lambda`; by default two rows of four numbers. `dynamic` has one entry an input."""
    return Inputs(args=args or (torch.randn(2, 4),), dynamic_shapes=None if dynamic is None else (dynamic,))


def rows(cases: list[Case], group: str) -> Callable[..., Callable[[Build], Build]]:
    """A decorator that appends a case to a list: named after the builder, for a row of the group."""

    def row(
        words: str, *, operators: str = "", types: Collection[type | str] = (), oldest_torch: str = ""
    ) -> Callable[[Build], Build]:
        def register(build: Build) -> Build:
            name = f"{group}-{build.__name__.replace('_', '-')}"
            case = Case(
                name=name,
                row=f"{group}: {words}",
                build=build,
                operators=operators,
                types=types,
                oldest_torch=oldest_torch,
            )
            cases.append(case)
            return build

        return register

    return row
