"""Faults that a check finds, and the error made of them."""

import itertools
from collections.abc import Iterable, Sequence

from stagepack.errors import FormatError, LimitError, Problem
from stagepack.format import limits

# rule, where, message
BrokenRule = tuple[str, str, str]


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise one error with all the problems, if there are any; of very many the first ones.

    Raises:
        LimitError: every problem is a limit.
        FormatError: any other rule is broken.
    """
    found = list(itertools.islice(problems, limits.REPORTED_PROBLEMS))
    if found:
        raise (LimitError if all(problem.rule.startswith("L") for problem in found) else FormatError)(found)


def format_names(names: Sequence[object]) -> str:
    """The first of some names, for a message."""
    return ", ".join(str(name)[:80] for name in names[:9]) or "none"
