"""How a process of a pipeline has ended."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """The end of a process, as far as its launcher knows it.

    Attributes:
        reason: a sentence for messages, such as ``"it ended with signal 9"``.
        exit_status: its exit status, negative for the number of a signal; None where it is not known.
    """

    reason: str
    exit_status: int | None = None


def stages_text(stages: Sequence[int]) -> str:
    """Return the numbers of some stages for messages, such as ``"stage 1"`` or ``"stages 2, 3"``."""
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"


def exit_text(exit_status: int) -> str:
    """How a process has ended, for messages."""
    return f"signal {-exit_status}" if exit_status < 0 else f"exit status {exit_status}"
