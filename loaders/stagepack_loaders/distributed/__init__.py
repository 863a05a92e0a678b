"""Stages in processes of their own, which exchange tensors by torch.distributed."""

from typing import Final

# The largest number of requests on their way through the stages, unless the caller names another.
DEFAULT_IN_FLIGHT: Final = 16
