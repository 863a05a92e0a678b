"""An operator that fails as CUDA does after an index out of range, if its input is negative."""

import torch


@torch.library.custom_op("stagepack_losing::lose", mutates_args=())
def lose(x: torch.Tensor) -> torch.Tensor:
    if float(x.min()) < 0:
        raise RuntimeError("CUDA error: device-side assert triggered")
    return x * 2


@lose.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Losing(torch.nn.Module):
    """Loses its device in its first stage, if it is cut before `second`."""

    def __init__(self) -> None:
        super().__init__()
        self.second = torch.nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(lose(x))
