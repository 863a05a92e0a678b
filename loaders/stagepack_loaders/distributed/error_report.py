"""Errors that cross from one process to another: their class by name, if it is one of stagepack's or of Python's own, and their message.

- How a process of a pipeline has ended.
"""

import builtins
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from stagepack import errors
from stagepack.errors import FormatError, Problem, StagepackError


class ReportedProblem(Struct, frozen=True):
    """A `Problem` of a `FormatError`."""

    rule: str
    where: str
    message: str


class ErrorReport(Struct, frozen=True, kw_only=True):
    """An error.

    Attributes:
        class_name: the name of its class.
        message: its message.
        problems: those of a `FormatError`.
    """

    class_name: str
    message: str
    problems: tuple[ReportedProblem, ...] = ()


def report_error(error: Exception) -> ErrorReport:
    """Describe an error."""
    problems = error.problems if isinstance(error, FormatError) else ()
    return ErrorReport(
        class_name=type(error).__name__,
        message=str(error),
        problems=tuple(ReportedProblem(problem.rule, problem.where, problem.message) for problem in problems),
    )


def rebuild_error(report: ErrorReport) -> Exception:
    """Return an error of the class that was reported, or a `StagepackError` that names another class."""
    error_class = getattr(errors, report.class_name, None) or getattr(builtins, report.class_name, None)
    if isinstance(error_class, type) and issubclass(error_class, FormatError) and report.problems:
        return error_class(
            [Problem(rule=problem.rule, where=problem.where, message=problem.message) for problem in report.problems]
        )
    if (
        isinstance(error_class, type)
        and issubclass(error_class, Exception)
        and not issubclass(error_class, FormatError)
    ):
        try:
            return error_class(report.message)
        except TypeError:  # of a class such as UnicodeDecodeError, which is not made from a message
            pass
    return StagepackError(f"{report.class_name}: {report.message}")


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
