"""Attributes of torch by the names that a bundle has for them: dtypes, layouts, memory formats."""

from typing import Any

import torch

from stagepack.errors import OperatorError


def torch_attribute(attribute_name: str, kind: type) -> Any:
    """Return a dtype, layout or memory format of torch.

    Args:
        attribute_name: its name in torch, such as ``float32``.
        kind: its class, such as `torch.dtype`.

    Raises:
        OperatorError: this torch has none of that name.
    """
    attribute = getattr(torch, attribute_name, None)
    if not isinstance(attribute, kind):
        raise OperatorError(f"torch {torch.__version__} has no {kind.__name__} {attribute_name!r}")
    return attribute
