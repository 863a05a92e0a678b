"""Which operators run, and what callers must name so that others run (SPEC G11)."""

from collections.abc import Collection, Iterable

from stagepack.format.graph import Graph
from stagepack.format.operators import (
    ALLOWED_NAMESPACES,
    FUNCTION_NAMESPACES,
    RUN_BY_DEFAULT,
    operator_namespace,
    operator_verdict,
    without_overload,
)
from stagepack.format.reader import Bundle


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


def bundle_permissions(bundle: Bundle) -> set[str]:
    """Return what a caller must name in ``allow_ops`` to load a bundle. Reads its graphs."""
    return needed_permissions(map(bundle.graph, range(len(bundle.stages))))
