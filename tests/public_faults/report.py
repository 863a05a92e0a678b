"""A fault that users of other tools have reported, as a small model and the calls that went wrong."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim

from stagepack.capture.inputs import Inputs
from tests.modules import module_of

AUTO = Dim.AUTO
ROWS = Dim("rows", min=1, max=64)
ANY_ROWS = Dim("rows", min=0, max=64)

REPORTS: list["Report"] = []


@dataclass(frozen=True, kw_only=True)
class Report:
    """One report."""

    address: str  # where it was reported
    fault: str  # what went wrong there
    build: Callable[[], torch.nn.Module]
    example: Inputs
    # Further calls, which the bundle must answer as the model does, or refuse where `refused` says so.
    calls: tuple[tuple[Any, ...], ...] = ()
    # What the refusal of the export says; empty for a model that is answered.
    refused: str = ""
    # Operators that the bundle needs and that are allowed by name only.
    allow_ops: tuple[str, ...] = ()
    # Whether its answers are compared in ONNX Runtime, too.
    onnx: bool = True

    @property
    def name(self) -> str:
        """Repository and number."""
        *_, owner, repository, _, number = self.address.split("/")
        return f"{owner}-{repository}-{number}"


def report(
    address: str, fault: str, *args: Any, dims: Any = None, kwargs: Mapping[str, Any] | None = None, **options: Any
) -> Callable[[Callable[[], torch.nn.Module]], Callable[[], torch.nn.Module]]:
    """Register a module class, or a function that makes a module, as the model of a report."""

    def register(build: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
        example = Inputs(args=args, kwargs=dict(kwargs or {}), dynamic_shapes=dims)
        address_in_full = f"https://github.com/{address}"
        REPORTS.append(Report(address=address_in_full, fault=fault, build=build, example=example, **options))
        return build

    return register


def report_of(
    address: str, fault: str, *args: Any, holds: Callable[[], dict[str, Any]] = dict, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a ``forward`` as that of the model of a report, with the modules, parameters and buffers that the model holds."""

    def register(forward: Callable[..., Any]) -> Callable[..., Any]:
        report(address, fault, *args, **options)(lambda: module_of(forward, **holds()))
        return forward

    return register


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random values, always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
