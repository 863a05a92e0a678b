"""Why a stage has no ONNX form."""

from collections.abc import Iterator

from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.onnx._internal.exporter import _core, _dispatching, _registration

from stagepack.format.graph import Graph
from stagepack.format.operators import ALLOWED_NAMESPACES, operator_namespace


def explain(graph: Graph, program: ExportedProgram | None, error: BaseException) -> str:
    """The operators without an ONNX form, each with the path of its module; or what else went wrong."""
    try:
        missing = [] if program is None else list(_missing(program))
    except Exception:  # noqa: BLE001 - torch cannot even decompose it, and raises what it likes
        missing = []
    if not missing and program is not None:
        missing = [
            (graph.ops[node.op].name, graph.scopes[node.scope].path)
            for node in graph.nodes
            if operator_namespace(graph.ops[node.op].name) not in ALLOWED_NAMESPACES
        ]
    if missing:
        modules: dict[str, dict[str, None]] = {}
        for operator, module in missing:
            modules.setdefault(operator, {})[module or "the model itself"] = None
        return "; ".join(f"no ONNX form of {operator} in {', '.join(found)}" for operator, found in modules.items())
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _missing(program: ExportedProgram) -> Iterator[tuple[str, str]]:
    """The operators for which torch's exporter has no function, and the paths of the modules that call them."""
    registry = _registration.ONNXRegistry.from_torchlib()
    decomposed = _core._prepare_exported_program_for_export(program, registry=registry)
    for module in decomposed.graph_module.modules():
        for node in module.graph.nodes:
            if node.op == "call_function" and _dispatching.dispatch(node, registry)[0] is None:
                paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
                wraps = isinstance(node.target, HigherOrderOperator) and isinstance(node.args[0], OpOverload)
                yield str(node.args[0] if wraps else node.target), paths[-1] if paths else ""
