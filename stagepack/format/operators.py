"""Names of operators, and the operators that no bundle may use (SPEC G10, G11).

`operators.txt` lists the verdicts on the operators of ATen and prims. Callers must name other operators so that they run.
"""

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from stagepack.format.graph import Graph

# Operators with these verdicts run by default; those with other ones, and those without one, run if the caller names them.
RUN_BY_DEFAULT: Final = frozenset({"pure", "view", "writes", "random"})
# The verdict on operators that no bundle may use, in any overload.
DENIED: Final = "denied"
# What the verdicts on the other ones mean, after "the operator ...".
REASONS: Final = {
    "ends-process": "can end the process or run without end when its arguments are wrong",
    "unused": "is not among those that torch.export makes of public functions",
}
# Python functions of symbolic scalars. A loader has a table from these names to the functions; it imports nothing by name.
PYTHON_OPERATORS: Final = frozenset(
    f"{module}.{function}"
    for module, functions in {
        "operator": "add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ xor not_ invert lshift rshift truth",
        "math": "ceil floor trunc sqrt",
        "torch": "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum",
    }.items()
    for function in functions.split()
)
HIGHER_ORDER_OPERATORS: Final = frozenset(
    f"higher_order.{operator}"
    for operator in ["cond", "while_loop", "map_impl", "scan", "associative_scan", "flex_attention", "invoke_subgraph"]
)
# Reads a size off a tensor. A cut adds such nodes to stages.
SIZE_OPERATOR: Final = "aten.sym_size.int"
# Namespaces whose operators are judged one by one. Operators of other namespaces run only if the caller names the namespace.
ALLOWED_NAMESPACES: Final = frozenset({"aten", "prims", "operator", "math", "torch", "higher_order"})
# Namespaces whose operators have no overloads.
FUNCTION_NAMESPACES: Final = frozenset({"operator", "math", "torch", "higher_order"})
_OPERATOR_NAME: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){1,2}", re.ASCII)
LIST_FILE: Final = Path(__file__).with_name("operators.txt")


@functools.cache
def listed_verdicts() -> Mapping[str, str]:
    """Return the verdict on each operator by its qualified name; a denied operator has a verdict by its name without the overload."""
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
    return without_overload(operator_name).removesuffix("_") in random_operators()


@functools.cache
def random_operators() -> frozenset[str]:
    """Return the names, without overloads, of the operators that draw from a random generator."""
    return frozenset(without_overload(name) for name, verdict in listed_verdicts().items() if verdict == "random")


def operator_namespace(operator_name: str) -> str:
    """Return the namespace of an operator, such as ``aten`` of ``aten.linear.default``."""
    return operator_name.split(".")[0]


def is_operator_name(operator_name: str) -> bool:
    """Whether a name has the form ``namespace.name.overload``, or ``namespace.name`` in the namespaces without overloads (G10)."""
    dot_count = 1 if operator_namespace(operator_name) in FUNCTION_NAMESPACES else 2
    return _OPERATOR_NAME.fullmatch(operator_name) is not None and operator_name.count(".") == dot_count


def is_denied_operator(operator_name: str) -> bool:
    """Whether no bundle may use an operator (G11).

    In the namespaces without overloads these are all operators but the listed ones; in the other namespaces the denied ones.
    """
    if operator_namespace(operator_name) in FUNCTION_NAMESPACES:
        return operator_name not in PYTHON_OPERATORS | HIGHER_ORDER_OPERATORS
    return operator_verdict(operator_name) == DENIED


def needed_permission(operator_name: str) -> str | None:
    """Return what a caller must name in ``allow_ops`` so that an operator runs: its namespace, or in ATen and prims the operator."""
    namespace = operator_namespace(operator_name)
    if namespace not in ALLOWED_NAMESPACES:
        return namespace
    if namespace in FUNCTION_NAMESPACES or operator_verdict(operator_name) in RUN_BY_DEFAULT:
        return None
    return without_overload(operator_name)


def is_permitted(operator_name: str, allow_ops: Collection[str]) -> bool:
    """Whether a caller lets an operator run that is not denied: it runs by default, or the caller names it or its namespace.

    allow_ops: what the caller names: namespaces of custom operators, and operators of ATen and prims with or without the overload.
    """
    permission = needed_permission(operator_name)
    return permission is None or permission in allow_ops or ("." in permission and operator_name in allow_ops)


def needed_permissions(graphs: Iterable[Graph]) -> set[str]:
    """Return what a caller must name in ``allow_ops`` so that all operators of graphs run."""
    permissions = {needed_permission(op.name) for graph in graphs for op in graph.ops}
    return {permission for permission in permissions if permission is not None}


def unsafe_operators(graphs: Iterable[Graph]) -> list[str]:
    """Return the operators of ATen and prims that do not run by default: at sizes that do not fit, they may end the process."""
    return sorted(
        permission for permission in needed_permissions(graphs) if operator_namespace(permission) in ALLOWED_NAMESPACES
    )
