"""Why a stage has no ONNX form."""

from torch.export import ExportedProgram

from stagepack.format.graph import Graph
from stagepack.format.operators import ALLOWED_NAMESPACES, operator_namespace
from stagepack.torch_internals import operators_without_onnx_form

_MAX_REASON_LENGTH = 300


def explain_failure(graph: Graph, program: ExportedProgram | None, error: BaseException) -> str:
    """Return the reason why a stage could not be converted.

    program: the captured stage; None if the capture failed.
    The result is the operators without an ONNX form, each with the paths of the modules that call it; if there are none, the first cause of
        the exception.
    """
    unsupported = [] if program is None else _unsupported_calls(graph, program)
    if unsupported:
        module_paths: dict[str, dict[str, None]] = {}
        for operator_name, module_path in unsupported:
            module_paths.setdefault(operator_name, {})[module_path or "the model itself"] = None
        return "; ".join(
            f"no ONNX form of {operator_name} in {', '.join(paths)}" for operator_name, paths in module_paths.items()
        )
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON_LENGTH]}"


def _unsupported_calls(graph: Graph, program: ExportedProgram) -> list[tuple[str, str]]:
    """The operators without an ONNX form, with the paths of the modules that call them; those that are custom, if torch cannot tell."""
    try:
        calls = [
            (operator_name, _module_path(node.meta)) for operator_name, node in operators_without_onnx_form(program)
        ]
    except Exception:  # noqa: BLE001 - torch cannot decompose the program, and raises any class
        calls = []
    return calls or [
        (graph.ops[node.op].name, graph.scopes[node.scope].path)
        for node in graph.nodes
        if operator_namespace(graph.ops[node.op].name) not in ALLOWED_NAMESPACES
    ]


def _module_path(meta: dict[str, object]) -> str:
    stack = meta.get("nn_module_stack")
    paths = [path for path, _ in stack.values()] if isinstance(stack, dict) else []
    return paths[-1] if paths else ""
