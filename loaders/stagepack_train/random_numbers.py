"""Random numbers of a training, such as those of dropout: the same as if one process ran the whole model on each microbatch.

Each microbatch begins with a seed of its own. The state of the generators passes from stage to stage with the values.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

Result = TypeVar("Result")


class RandomNumbers:
    """The generators of one stage."""

    def __init__(self, device: torch.device, *, draws: bool, is_received: bool, is_sent: bool) -> None:
        self._device = device
        self._draws = draws
        self.is_received = is_received
        self.is_sent = is_sent
        self._next_seed = 0

    @property
    def is_used(self) -> bool:
        """Whether the stage draws random numbers, or passes the state of generators on."""
        return self._draws or self.is_received or self.is_sent

    def begin(self, first_seed: int) -> None:
        """Set the seed of the first microbatch of a step; that of each other one is the next number."""
        self._next_seed = first_seed

    def run(self, function: Callable[[], Result], state: torch.Tensor | None) -> tuple[Result, torch.Tensor | None]:
        """Call a function on the next microbatch. The generators have their old states afterwards."""
        seed = self._next_seed
        self._next_seed += 1
        if not self._draws:
            return function(), state
        with forked_generators([self._device]):
            if state is None:
                torch.manual_seed(seed)
            else:
                _set_generator_states(self._device, state.cpu())
            result = function()
            return result, generator_states(self._device).to(self._device) if self.is_sent else None


def random_numbers_of_stage(device: torch.device, stage_number: int, random_stages: Sequence[int]) -> RandomNumbers:
    """Return the generators of a stage. Their state passes from the first one of `random_stages`, which draw numbers, to the last one."""
    first, last = (random_stages[0], random_stages[-1]) if random_stages else (stage_number, stage_number)
    return RandomNumbers(
        device,
        draws=stage_number in random_stages,
        is_received=first < stage_number <= last,
        is_sent=first <= stage_number < last,
    )


def generator_states(device: torch.device) -> torch.Tensor:
    """Return the states of the generator of the host and of that of a device, in one tensor of bytes."""
    host_state = torch.get_rng_state()
    if device.type == "cpu":
        return host_state
    device_state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return torch.cat([host_state, device_state])


def _set_generator_states(device: torch.device, states: torch.Tensor) -> None:
    host_bytes = len(torch.get_rng_state())
    torch.set_rng_state(states[:host_bytes])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[host_bytes:], device)


def forked_generators(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Return a context after which the generators of the host and of some devices have their old states."""
    accelerators = list({device for device in devices if device.type != "cpu"})
    device_type = accelerators[0].type if accelerators else "cuda"
    return torch.random.fork_rng(accelerators, device_type=device_type)
