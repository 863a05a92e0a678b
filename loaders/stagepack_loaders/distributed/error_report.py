"""Errors that cross from one process to another: their class by name, if it is one of stagepack's or of Python's own, and their message."""

import builtins

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
