"""What a node costs at the sizes of the example: floating-point operations by torch's own counter, and bytes moved."""

import math
from typing import Any

import torch
from torch.fx import Node as FxNode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from stagepack.format.graph import Cost

# Operators that torch's counter counts only after it has taken them apart; they are counted on meta tensors.
_COMPOSITE = frozenset(
    {
        torch.ops.aten.linear,
        torch.ops.aten.matmul,
        torch.ops.aten.einsum,
        torch.ops.aten.conv1d,
        torch.ops.aten.conv2d,
        torch.ops.aten.conv3d,
        torch.ops.aten.conv_transpose1d,
        torch.ops.aten.conv_transpose2d,
        torch.ops.aten.conv_transpose3d,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.bilinear,
        torch.ops.aten.chain_matmul,
    }
)

# Operators that read, of their first argument, only what they give back.
_GATHERS = frozenset(
    {
        torch.ops.aten.embedding,
        torch.ops.aten.gather,
        torch.ops.aten.index,
        torch.ops.aten.index_select,
        torch.ops.aten.take,
    }
)


class CostModel:
    """Costs of nodes, remembered by operator and sizes, since layers repeat."""

    def __init__(self) -> None:
        """Start with nothing remembered."""
        self._flops: dict[Any, int] = {}

    def of(self, node: FxNode) -> Cost:
        """The cost of one node; an operator that is not in torch's counter counts one operation an output element."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return Cost()
        made = [meta for meta in _flat(node.meta.get("val")) if isinstance(meta, torch.Tensor)]
        given = (source.meta.get("val") for source in node.all_input_nodes)
        used = [meta for meta in given if isinstance(meta, torch.Tensor)]
        if target.overloadpacket in _GATHERS:
            used[:1] = made
        if target.is_view:
            return Cost()
        elements = sum(map(_elements, made))
        flops = elements if any(meta.is_floating_point() for meta in made) else 0
        if target.overloadpacket in _COMPOSITE or target.overloadpacket in flop_registry:
            flops = self._counted(node)
        return Cost(flops=flops, bytes=sum(_elements(meta) * meta.element_size() for meta in (*made, *used)))

    def _counted(self, node: FxNode) -> int:
        def concrete(given: Any) -> Any:
            meta = given.meta["val"]
            if isinstance(meta, torch.Tensor):
                return torch.empty([_hint(size) for size in meta.shape], dtype=meta.dtype, device="meta")
            return _hint(meta) if isinstance(meta, torch.SymInt) else meta

        args = torch.fx.map_arg(node.args, concrete)
        kwargs = torch.fx.map_arg(node.kwargs, concrete)
        key = (node.target, _key(args), _key(kwargs))
        if key not in self._flops:
            counter = FlopCounterMode(display=False)
            with counter, torch.no_grad():
                node.target(*args, **kwargs)  # type: ignore[operator]
            self._flops[key] = counter.get_total_flops()
        return self._flops[key]


def _hint(size: Any) -> int:
    """The size in the example; 1 where it depends on data."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else 1
    return int(hint)


def _elements(meta: torch.Tensor) -> int:
    return math.prod(map(_hint, meta.shape))


def _flat(meta: Any) -> list[Any]:
    return list(meta) if isinstance(meta, list | tuple) else [meta]


def _key(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return (tuple(given.shape), given.dtype)
    if isinstance(given, list | tuple):
        return tuple(map(_key, given))
    if isinstance(given, dict):
        return tuple((name, _key(part)) for name, part in given.items())
    return given
