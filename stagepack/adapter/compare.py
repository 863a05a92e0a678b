"""What differs between two adapters: their bases, the modules and weights that they change, and how."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stagepack.adapter.document import A_SUFFIX, B_SUFFIX, BIAS_SUFFIX, TENSORS_NAME, LowRankChange
from stagepack.adapter.opened import OpenAdapter
from stagepack.format.shapes import format_shape
from stagepack.format.weights import StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDifferences:
    """What differs between an adapter A and an adapter B; all are empty for equal adapters.

    Attributes:
        base: the digests of their bases, if they are of two bundles.
        weights: what differs in a change, by the path of the module, or by the name of the replaced weight.
        files: differences of how they are stored.
    """

    base: tuple[str, ...]
    weights: Mapping[str, str]
    files: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return bool(self.base or self.weights or self.files)


def compare_adapters(first: OpenAdapter, second: OpenAdapter) -> AdapterDifferences:
    """Compare two adapters. Those of one digest are equal; otherwise the tensors are read that both have."""
    if first.digest == second.digest:
        return AdapterDifferences(base=(), weights={}, files=())
    base = () if first.base == second.base else (f"{first.base} and {second.base}",)
    weights = {}
    for module in dict.fromkeys((*first.changes, *second.changes)):
        if first.changes.get(module) is None or second.changes.get(module) is None:
            weights[module] = f"only in {'A' if module in first.changes else 'B'}"
        elif parts := list(_change_differences(first, second, first.changes[module], second.changes[module])):
            weights[module] = ", ".join(parts)
    for name in dict.fromkeys((*first.document.replaced, *second.document.replaced)):
        if difference := _tensor_difference(first, second, name):
            weights[name] = f"replaced: {difference}"
    is_stored_otherwise = not (base or weights)
    files = ("the same changes, stored otherwise",) if is_stored_otherwise else ()
    return AdapterDifferences(base=base, weights=weights, files=files)


def _change_differences(first: OpenAdapter, second: OpenAdapter, a: LowRankChange, b: LowRankChange) -> Iterator[str]:
    """Yield what differs in a low-rank change that both adapters have."""
    module = a.module
    if a.weight != b.weight:
        yield f"of the weights {a.weight} and {b.weight}"
    ranks = first.pairs[module].rank, second.pairs[module].rank
    if ranks[0] != ranks[1]:
        yield f"rank {ranks[0]} and {ranks[1]}"
    if a.scale != b.scale:
        yield f"scale {a.scale:g} and {b.scale:g}"
    if bias := _tensor_difference(first, second, module + BIAS_SUFFIX):
        yield f"bias {bias}"
    if ranks[0] == ranks[1]:
        pair = (_tensor_difference(first, second, module + suffix) for suffix in (A_SUFFIX, B_SUFFIX))
        yield from itertools.islice(filter(None, pair), 1)


def _tensor_difference(first: OpenAdapter, second: OpenAdapter, name: str) -> str:
    """What differs in a tensor; nothing if it is the same one, or in neither adapter."""
    a, b = first.tensors.get(name), second.tensors.get(name)
    if a is None or b is None:
        return "" if a is b else f"only in {'B' if a is None else 'A'}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{_kind(a)} and {_kind(b)}"
    pieces = (adapter.pieces(TENSORS_NAME, stored.start, stored.end) for adapter, stored in ((first, a), (second, b)))
    return "" if all(x == y for x, y in zip(*pieces, strict=True)) else "other values"


def _kind(stored: StoredTensor) -> str:
    return f"{stored.dtype}{format_shape(stored.shape)}"
