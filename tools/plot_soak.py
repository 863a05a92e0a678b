"""Draw what a soak of the server has seen: python -m tools.plot_soak SAMPLES PICTURE.

The samples are written by `STAGEPACK_SOAK_MINUTES=30 STAGEPACK_SOAK_FILE=SAMPLES pytest -m slow tests/serve/test_soak.py`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib import pyplot

_MEGABYTE = 1e6


def draw(seen: dict[str, Any], picture: Path) -> None:
    """Draw memory, times and outcomes over the time of a soak."""
    samples = seen["samples"]
    minutes = [sample["seconds"] / 60 for sample in samples]
    figure, (memory, durations, rates) = pyplot.subplots(3, sharex=True, figsize=(9, 8), layout="constrained")
    for key, label in (("memory", "all stages in one process"), ("front_memory", "front of two processes")):
        memory.plot(minutes, [sample[key] / _MEGABYTE for sample in samples], label=label)
    memory.set(ylabel="memory, MB", ylim=(0, None))
    for key in ("p50", "p99"):
        durations.plot(minutes, [1e3 * (sample[key] or float("nan")) for sample in samples], label=key)
    durations.set(ylabel="time of an answer, ms", yscale="log")
    for outcome in sorted(seen["outcomes"], key=seen["outcomes"].get, reverse=True):
        counts = [sample["outcomes"].get(outcome, 0) for sample in samples]
        rates.plot(minutes, counts, label=outcome)
    rates.set(ylabel="requests so far", xlabel="minutes", yscale="log")
    for axes in (memory, durations, rates):
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
