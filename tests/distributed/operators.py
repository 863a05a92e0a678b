"""Operators that take long, or lose their device, and models of them."""

import time

import torch

from tests.modules import module_of


@torch.library.custom_op("stagepack_waiting::wait", mutates_args=())
def wait(seconds: torch.Tensor) -> torch.Tensor:
    """Take as many seconds as the input says."""
    time.sleep(float(seconds.max()))
    return seconds * 2


@wait.register_fake
def _(seconds: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(seconds)


def waiting_module() -> torch.nn.Module:
    return module_of(lambda self, seconds: wait(seconds))


class Waiting(torch.nn.Module):
    """Waits in its first stage, if it is cut before `second`, and in its second one, if it is cut before `wait`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wait, self.second = torch.nn.ReLU(), waiting_module(), torch.nn.ReLU()

    def forward(self, seconds: torch.Tensor) -> torch.Tensor:
        return self.second(self.wait(self.first(seconds)))


@torch.library.custom_op("stagepack_losing::lose", mutates_args=())
def lose(x: torch.Tensor) -> torch.Tensor:
    """Fail as CUDA does after an index out of range, if the input is negative."""
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
