"""Lanes: consecutive stages on one device, each of which works on a call of its own in its own thread."""

import itertools
from collections.abc import Callable, Sequence
from queue import SimpleQueue

Tasks = SimpleQueue[Callable[[], None] | None]


def run_tasks(tasks: Tasks, next_tasks: Sequence[Tasks]) -> None:
    """Run the tasks of a lane until its end, and tell the next lane."""
    while (task := tasks.get()) is not None:
        task()
        del task  # the values of the call and the executor are not kept until the next one comes
    end_threads(next_tasks)


def end_threads(first_tasks: Sequence[Tasks]) -> None:
    """End the threads of lanes after their tasks."""
    for tasks in first_tasks:
        tasks.put(None)


def device_lanes(devices: Sequence[str]) -> list[list[int]]:
    """Group the numbers of consecutive stages on one device."""
    return [list(lane) for _, lane in itertools.groupby(range(len(devices)), lambda number: devices[number])]


def thread_end_text(lane_number: int, error: BaseException) -> str:
    """Say that the thread of a lane has ended."""
    return f"the thread of lane {lane_number} has ended: {type(error).__name__}: {error}".removesuffix(": ")
