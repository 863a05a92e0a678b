"""`split_here`: a mark in the model's own code where a stage begins."""

import torch
from torch.fx.node import has_side_effect

OPERATOR = "stagepack::split_here"


@torch.library.custom_op(OPERATOR, mutates_args=())
def _split_here() -> None:
    pass


@_split_here.register_fake
def _() -> None:
    pass


# Nothing uses its result, so dead code elimination would drop it.
has_side_effect(torch.ops.stagepack.split_here.default)


def split_here() -> None:
    """Mark the place where the next stage begins; it does nothing when the model runs.

    ``torch.distributed.pipelining.pipe_split()`` is understood as the same mark.
    """
    torch.ops.stagepack.split_here()
