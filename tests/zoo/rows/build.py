"""What the rows are built of: a module made of a function, and the decorators that make a case of it, or of a builder."""

import functools
from collections.abc import Callable
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


class Rows:
    """Decorators that append a case to a list, for a row of a group; the case is named after the function."""

    def __init__(self, cases: list[Case], group: str) -> None:
        self._cases = cases
        self._group = group

    def __call__(self, words: str, **options: Any) -> Callable[[Build], Build]:
        """A case of a builder."""

        def register(build: Build) -> Build:
            name = f"{self._group}-{build.__name__.replace('_', '-')}"
            self._cases.append(Case(name=name, row=f"{self._group}: {words}", build=build, **options))
            return build

        return register

    def of(
        self,
        words: str,
        layers: str,
        args: Callable[[], tuple[Any, ...]] = lambda: (),
        *,
        held: Callable[[], dict[str, Any]] = dict,
        dynamic: tuple[Any, ...] | None = None,
        frozen: bool = False,
        evaluates: bool = False,
        **options: Any,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A case of a `Lambda` of the function, with a square layer for each letter, and what else it holds."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def build() -> Model:
                model = Lambda(function, **linears(layers), **held()).train(not evaluates)
                return model.requires_grad_(False) if frozen else model, given(*args(), dynamic=dynamic)

            self(words, **options)(build)
            return function

        return register
