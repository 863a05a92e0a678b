"""The module and the line of a user's code that a node of a captured program came from, for errors about the node."""

from torch.fx import Node as FxNode

from stagepack.capture.error_location import traced_location
from stagepack.linearize.operators import module_stack


def with_node_location(message: str, node: FxNode | None) -> str:
    """Append module and line of a node to a message about it, such as ``(layers.0: net.py, line 7, in forward)``, if they are known."""
    if node is None:
        return message
    stack = module_stack(node)
    path = stack[-1].path if stack else ""
    location = ": ".join(filter(None, (path, traced_location(node.meta.get("stack_trace") or ""))))
    return f"{message} ({location})" if location else message
