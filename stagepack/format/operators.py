"""Names of operators, and the operators that no bundle may use (SPEC G10, G11)."""

import re
from typing import Final

from stagepack.format.operator_list import DENIED, operator_verdict

# Python functions of symbolic scalars. A loader has a table from these names to the functions; it imports nothing by name.
PYTHON_OPERATORS: Final = (
    frozenset(
        f"operator.{function}"
        for function in [
            "add",
            "sub",
            "mul",
            "truediv",
            "floordiv",
            "mod",
            "pow",
            "neg",
            "pos",
            "abs",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "and_",
            "or_",
            "xor",
            "not_",
            "invert",
            "lshift",
            "rshift",
            "truth",
        ]
    )
    | frozenset(f"math.{function}" for function in ["ceil", "floor", "trunc", "sqrt"])
    | frozenset(
        f"torch.{function}"
        for function in ["sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sqrt", "sym_sum"]
    )
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
