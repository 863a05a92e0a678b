"""Grad mode and autocast in a captured program -> contexts of nodes.

``torch.export`` puts the nodes under ``torch.no_grad`` or ``torch.autocast`` into a graph module of their own, which one node calls.
"""

import torch
from torch.fx import Node as FxNode

from stagepack.format.graph import Autocast, Context
from stagepack.linearize.weight_table import dtype_name

_GRAD_MODE = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"


def opens_context(node: FxNode) -> bool:
    """Return whether a node calls a graph module under another grad mode or autocast."""
    return str(node.target) in (_GRAD_MODE, _AUTOCAST)


def context_module_position(node: FxNode) -> int:
    """Return the position, among the arguments of a node that opens a context, of the graph module that it calls; its inputs follow."""
    return 1 if str(node.target) == _GRAD_MODE else 4


def opened_context(node: FxNode, parent: int | None, capture_device: str) -> Context:
    """Return the context that a node opens."""
    if str(node.target) == _GRAD_MODE:
        return Context(parent=parent, grad=bool(node.args[0]))
    device_type, dtype, is_enabled, caches_weights = node.args[:4]
    dtype = torch.get_autocast_dtype(str(device_type)) if dtype is None else dtype
    assert isinstance(dtype, torch.dtype)
    autocast = Autocast(
        device=None if device_type == capture_device else str(device_type),
        dtype=dtype_name(dtype),
        enabled=bool(is_enabled),
        cache=torch.is_autocast_cache_enabled() if caches_weights is None else bool(caches_weights),
    )
    return Context(parent=parent, autocast=autocast)
