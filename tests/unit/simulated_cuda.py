"""A device that works later, as CUDA does, on memory of the CPU: what is copied on a stream is copied when somebody waits for it.

So a page-locked piece that is filled again before its copy is made, or memory that is read before its event, has the wrong bytes. It has
what the loaders use of `torch.cuda` and `torch.accelerator`, and nothing else.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
import torch

DEVICE = torch.device("cuda:0")

# What stagepack and its loaders use of torch.cuda and torch.accelerator, beside methods of tensors. Streams and events have the methods
# of the classes below.
USED_NAMES = {
    "torch.accelerator.current_accelerator", "torch.accelerator.current_device_index",
    "torch.accelerator.current_stream", "torch.accelerator.synchronize", "torch.cuda.Event", "torch.cuda.Stream",
    "torch.cuda.current_stream", "torch.cuda.device_count", "torch.cuda.get_device_capability",
    "torch.cuda.get_device_name", "torch.cuda.get_device_properties", "torch.cuda.get_rng_state_all",
    "torch.cuda.is_available", "torch.cuda.is_initialized", "torch.cuda.mem_get_info",
    "torch.cuda.set_rng_state_all", "torch.cuda.stream",
}  # fmt: skip


class Stream:
    """Work in order, which is done when somebody waits for it."""

    def __init__(self, device: torch.device) -> None:
        assert device == DEVICE
        self._work: list[Callable[[], object]] = []
        self._lock = threading.RLock()

    def submit(self, work: Callable[[], object]) -> int:
        """Add work; return how much there is."""
        with self._lock:
            self._work.append(work)
            return len(self._work)

    def run_until(self, end: int) -> None:
        """Do the work up to an index."""
        with self._lock:
            for index in range(end):
                work, self._work[index] = self._work[index], _nothing
                work()

    def wait_event(self, event: "Event") -> None:
        """Do what comes later only after an event."""
        self.submit(event.synchronize)


class Event:
    """A position in the work of a stream."""

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._end = 0

    def record(self, stream: Stream) -> None:
        """Take the position after all work that the stream has now."""
        self._stream, self._end = stream, stream.submit(_nothing)

    def synchronize(self) -> None:
        assert self._stream is not None, "the event was not recorded"
        self._stream.run_until(self._end)


class CurrentStream(Stream):
    """The stream that operators run on, which the simulation runs at once."""

    def wait_event(self, event: "Event") -> None:
        event.synchronize()


def _nothing() -> None:
    """No work."""


class SimulatedCuda:
    """Replaces names of torch in a test.

    Attributes:
        device: the device.
        page_locked_bytes: how much page-locked memory was allocated.
        recorded: how often a tensor was said to be in use by a stream.
        waits: how often the host waited for a copy of an input.
    """

    def __init__(self) -> None:
        self.device = DEVICE
        self.page_locked_bytes = 0
        self.recorded = 0
        self.waits = 0
        self._current = threading.local()
        self._default = CurrentStream(DEVICE)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Self:
        """Replace the names until the end of the test."""
        empty, empty_strided, copy = torch.empty, torch.empty_strided, torch.Tensor.copy_
        to: Callable[..., torch.Tensor] = torch.Tensor.to

        def simulated_empty(*size: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            memory = empty(*size, device=None if device == DEVICE else device, **options)
            self.page_locked_bytes += memory.nbytes if pin_memory else 0
            return memory.fill_(0xEE) if memory.dtype == torch.uint8 else memory

        def simulated_empty_strided(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            memory = empty_strided(*size, **options)
            self.page_locked_bytes += memory.nbytes if pin_memory else 0
            return memory

        def simulated_to(tensor: torch.Tensor, *args: Any, non_blocking: bool = False, **options: Any) -> torch.Tensor:
            if DEVICE not in args:
                return to(tensor, *args, non_blocking=non_blocking, **options)
            self.waits += not non_blocking
            return tensor.clone()

        def simulated_copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            stream = getattr(self._current, "stream", None)
            if stream is None:
                return copy(target, source)
            assert non_blocking, "the host would wait for the device"
            stream.submit(lambda: copy(target, source))
            return target

        def record_stream(_: torch.Tensor, stream: Stream) -> None:
            assert isinstance(stream, Stream)
            self.recorded += 1

        monkeypatch.setattr(torch, "empty", simulated_empty)
        monkeypatch.setattr(torch, "empty_strided", simulated_empty_strided)
        monkeypatch.setattr(torch.Tensor, "to", simulated_to)
        monkeypatch.setattr(torch.Tensor, "copy_", simulated_copy)
        monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
        for name, value in {"Stream": Stream, "Event": Event, "stream": self.stream}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self._default)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        return self

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._current.stream = stream
        yield
        self._current.stream = None
