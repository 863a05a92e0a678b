"""`split_here`: a marker in the code of a model, where a stage begins."""

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
    """Begin the next stage here. Call it in the code of a model.

    It does nothing when the model runs. ``torch.distributed.pipelining.pipe_split()`` is understood as the same marker. Markers count
    only if `stagepack.export` is called without `stages`, `split_at`, `policy` and `plan`.

    Examples:
        >>> def forward(self, x):
        ...     x = self.encoder(x)
        ...     stagepack.split_here()
        ...     return self.decoder(x)
    """
    torch.ops.stagepack.split_here()
