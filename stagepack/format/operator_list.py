"""The verdicts on the operators of ATen and prims, which `operators.txt` lists (SPEC G11)."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Final

# Operators with these verdicts run by default; those with other ones, and those without one, run if the caller names them.
RUN_BY_DEFAULT: Final = frozenset({"pure", "view", "writes", "random"})
# The verdict on operators that no bundle may use, in any overload.
DENIED: Final = "denied"
# What the verdicts on the other ones mean, after "the operator ...".
REASONS: Final = {
    "ends-process": "can end the process or run without end when its arguments are wrong",
    "unused": "is not among those that torch.export makes of public functions",
}

LIST_FILE: Final = Path(__file__).with_name("operators.txt")


@functools.cache
def listed_verdicts() -> Mapping[str, str]:
    """Return the verdict on each operator by its qualified name; that of a denied operator by its name without the overload."""
    words = LIST_FILE.read_text().partition("\n")[2].split()  # after a line of comment
    return dict(zip(words[::2], words[1::2], strict=True))


def operator_verdict(operator_name: str) -> str | None:
    """Return the verdict on an operator; None if it has none."""
    verdicts = listed_verdicts()
    return verdicts.get(operator_name) or verdicts.get(without_overload(operator_name))


def without_overload(operator_name: str) -> str:
    """Return the name of an operator without its overload, such as ``aten.linear`` of ``aten.linear.default``."""
    return operator_name.rpartition(".")[0]


def is_random_operator(operator_name: str) -> bool:
    """Tell whether an operator is listed as one that draws from a random generator, in this or another overload, or out of place."""
    return without_overload(operator_name).removesuffix("_") in _random_operators()


@functools.cache
def _random_operators() -> frozenset[str]:
    return frozenset(without_overload(name) for name, verdict in listed_verdicts().items() if verdict == "random")
