"""An operator that takes as many seconds as its input says."""

import time

import torch


@torch.library.custom_op("stagepack_waiting::wait", mutates_args=())
def wait(seconds: torch.Tensor) -> torch.Tensor:
    time.sleep(float(seconds.max()))
    return seconds * 2


@wait.register_fake
def _(seconds: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(seconds)


class Wait(torch.nn.Module):
    """Waits."""

    def forward(self, seconds: torch.Tensor) -> torch.Tensor:
        return wait(seconds)


class Waiting(torch.nn.Module):
    """Waits in its first stage, if it is cut before `second`, and in its second one, if it is cut before `wait`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wait, self.second = torch.nn.ReLU(), Wait(), torch.nn.ReLU()

    def forward(self, seconds: torch.Tensor) -> torch.Tensor:
        return self.second(self.wait(self.first(seconds)))
