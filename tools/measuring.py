"""Seconds of calls: of one, of several sides in turns, so that what else the machine does meets all of them, and of fresh processes.

Further: the rate of requests, and the memory of a process.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Call = Callable[[], object]


def seconds_of(call: Call, wait: Call = lambda: None, clock: Callable[[], float] = time.perf_counter) -> float:
    """Time a call; `wait` returns when the device has finished."""
    wait()
    start_time = clock()
    call()
    wait()
    return clock() - start_time


def seconds_in_turns(
    sides: Mapping[str, Call],
    rounds: int,
    *,
    warm_rounds: int = 0,
    wait: Call = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time the sides one after the other in each round; the first `warm_rounds` do not count."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(warm_rounds + rounds):
        for side, call in sides.items():
            seconds[side].append(seconds_of(call, wait, clock))
    return {side: side_seconds[warm_rounds:] for side, side_seconds in seconds.items()}


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each side."""
    return {side: statistics.median(side_seconds) for side, side_seconds in seconds.items()}


def median_seconds(call: Call, calls: int) -> float:
    """The median time of a call, after one that does not count."""
    return statistics.median(seconds_in_turns({"": call}, calls, warm_rounds=1)[""])


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios of two sides that were measured in turns."""
    return statistics.median(above / below for above, below in zip(numerators, denominators, strict=True))


async def answers_per_second(ask: Callable[[], Awaitable[object]], clients: int, seconds: float) -> float:
    """Keep so many requests under way; those of them that are answered in a second."""
    end_time, answer_count = time.perf_counter() + seconds, 0

    async def ask_again_and_again() -> None:
        nonlocal answer_count
        while time.perf_counter() < end_time:
            await ask()
            answer_count += 1

    await asyncio.gather(*(ask_again_and_again() for _ in range(clients)))
    return answer_count / seconds


def run_python(*arguments: str, timeout: float | None = None, command: Sequence[str] = (), **variables: str) -> Any:
    """Run Python with arguments in a fresh process, and return the JSON of the last line that it prints.

    Args:
        arguments: what Python is called with.
        timeout: in seconds.
        command: what runs Python, if anything does.
        variables: of its environment.

    Raises:
        subprocess.SubprocessError: it fails, or takes too long; `stderr` of the error has what it said.
    """
    try:
        finished = subprocess.run(
            [*command, sys.executable, "-X", "faulthandler", *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=timeout,
            env=os.environ | variables,
        )
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr[-4000:])
        raise
    return json.loads(finished.stdout.splitlines()[-1])


def memory_of_status(field: str, process_id: int | str = "self") -> int:
    """The bytes of a field of ``/proc/PROCESS/status``, such as ``RssAnon``, the memory that is its own and no file's."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process_id}/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024
