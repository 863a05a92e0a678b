"""What the caller said about dynamic dimensions: their names, and which sizes they may have."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim

from stagepack.capture.dynamic_dims import declared_dims
from stagepack.capture.programs import Capture
from stagepack.torch_internals import DimHint, symbolic_expression


@dataclass(frozen=True, slots=True)
class DeclaredDimension:
    """A size of an input that the caller said something about."""

    # The number of the input among the leaves of all arguments.
    leaf: int
    # The dimension of the tensor; None where the input is an integer.
    axis: int | None
    # What the caller passed for it in `dynamic_shapes`.
    dim: Any
    size: "int | torch.SymInt"

    @property
    def symbol_name(self) -> str | None:
        """The name of the only symbol of torch in the size; None if there is none, or several."""
        symbols = symbolic_expression(self.size).free_symbols if isinstance(self.size, torch.SymInt) else ()
        return str(*symbols) if len(symbols) == 1 else None

    @property
    def named_dim(self) -> Any:
        """The ``Dim`` of the only symbol in the size: the ``Dim`` of ``h`` where the size is ``4*h``; None if the caller named none."""
        if not isinstance(self.dim, Dim) or not isinstance(self.size, torch.SymInt):
            return None
        return self.dim if symbolic_expression(self.size).is_Symbol else getattr(self.dim, "root", self.dim)


@dataclass(frozen=True, slots=True)
class SizeRequest:
    """What a caller asked for of a symbol."""

    # The smallest size that may be tried.
    smallest: int
    # The largest size that was asked for; None for any.
    largest: int | None
    # Whether the caller has said which sizes there may be.
    is_explicit: bool
    # Where the caller did so; None for a program without its model, of which only its own ranges are known.
    dimension: DeclaredDimension | None = None


@dataclass(frozen=True, slots=True)
class DeclaredSizes:
    """What the caller said about the sizes of inputs."""

    # In the order of the inputs.
    dimensions: tuple[DeclaredDimension, ...]
    # What was asked for, by the name of torch's symbol.
    requests: Mapping[str, SizeRequest]

    @property
    def names(self) -> dict[str, str]:
        """The names of each ``torch.export.Dim``, by the name of torch's symbol."""
        dim_names: dict[str, str] = {}
        for declared in self.dimensions:
            if declared.symbol_name is not None and declared.named_dim is not None:
                dim_names.setdefault(declared.symbol_name, declared.named_dim.__name__)
        return dim_names


def declared_sizes(capture: Capture) -> DeclaredSizes:
    """Return what the dynamic shapes of a capture say."""
    if capture.model is None:
        # Where torch begins a range of which the caller has said nothing.
        requests = {
            str(symbol): SizeRequest(0, None, is_explicit=False)
            for symbol, sizes in capture.program.range_constraints.items()
            if sizes.lower == 2 and not str(sizes.upper).isdigit()
        }
        return DeclaredSizes((), requests)
    dimensions, requests = tuple(_dimensions(capture)), {}
    for declared in dimensions:
        request, symbol_name = _request(declared), declared.symbol_name
        if request is not None and symbol_name is not None:
            known_request = requests.setdefault(symbol_name, request)
            if request.smallest > known_request.smallest:
                requests[symbol_name] = request
    return DeclaredSizes(dimensions, requests)


def _dimensions(capture: Capture) -> Iterator[DeclaredDimension]:
    if not capture.inputs.dynamic_shapes or capture.model is None:
        return
    leaf_dims = [dims for _, dims in declared_dims(capture.model.forward, capture.inputs)]
    placeholders = [node for node in capture.program.graph.nodes if node.op == "placeholder"]
    # The inputs follow the weights.
    values = [placeholder.meta.get("val") for placeholder in placeholders[-len(leaf_dims) :]]
    for leaf, (value, dims) in enumerate(zip(values, leaf_dims, strict=False)):
        for axis, dim in dims.items():
            if axis is None or axis < value.ndim:  # torch ignores a dimension that a tensor does not have
                yield DeclaredDimension(leaf, axis, dim, value if axis is None else value.shape[axis])


def _request(declared: DeclaredDimension) -> SizeRequest | None:
    dim = declared.named_dim
    if dim is not None:
        largest = dim.max if isinstance(dim.max, int) else None
        return SizeRequest(dim.min, largest, is_explicit=True, dimension=declared)
    if isinstance(declared.dim, DimHint) and str(declared.size) == declared.symbol_name:
        hint = declared.dim
        return SizeRequest(hint.min or 0, hint.max, is_explicit=hint.min is not None, dimension=declared)
    return None
