"""Broken rules, and the error that reports them."""

import itertools
from collections.abc import Iterable, Sequence

from stagepack.errors import FormatError, LimitError, Problem
from stagepack.format import limits

# A problem in one file: the number of the rule, the location in the file, and a message.
BrokenRule = tuple[str, str, str]


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise one error with all problems, if there are any. Of very many problems, the first `limits.REPORTED_PROBLEMS` are reported."""
    reported = list(itertools.islice(problems, limits.REPORTED_PROBLEMS))
    if reported:
        raise (LimitError if all(problem.rule.startswith("L") for problem in reported) else FormatError)(reported)


def format_names(listed_names: Sequence[object]) -> str:
    """Return the first names of a sequence as text, for a message."""
    return ", ".join(str(listed_name)[:80] for listed_name in listed_names[:9]) or "none"
