"""Warnings for models exported in training mode by mistake, those that cannot be trained, and those that need `allow_ops` to be loaded."""

from stagepack.capture.programs import Capture
from stagepack.errors import ExportWarning, warn_caller
from stagepack.format.graph import Graph
from stagepack.format.operator_permissions import needed_permissions
from stagepack.linearize import LinearizedProgram

_SHOWN_MODULES = 3
# Buffers of torch's batch norms, in training mode updated by each call.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def warn_of_training_mode(capture: Capture, program: LinearizedProgram, written_weights: tuple[str, ...]) -> None:
    """Warn if a model in training mode drops values at random or updates statistics of batches, as dropout and batch norm do."""
    if capture.model is None or not capture.model.training:
        return
    graph = program.graph
    # The last argument of these operators is whether they train.
    dropouts = [
        graph.scopes[node.scope].path
        for node in graph.nodes
        if graph.ops[node.op].random and graph.ops[node.op].name.endswith("dropout.default") and True in node.args
    ]
    statistics = [name for name in written_weights if name.endswith(_STATISTICS)]
    reasons = []
    if dropouts:
        reasons.append(f"drops values at random ({_shown(dropouts)})")
    if statistics:
        reasons.append(f"updates statistics of batches ({_shown(statistics)})")
    if reasons:
        warn_caller(
            ExportWarning(
                f"{capture.model_name} is exported in training mode: each call {' and '.join(reasons)}. Call model.eval() before the "
                "export, unless the bundle is to be trained",
            )
        )


def warn_of_lost_backward(capture: Capture) -> None:
    """Warn if a model calls functions with a backward of their own, which torch does not capture."""
    if capture.functions:
        class_names = [function.class_name for function in capture.functions]
        warn_caller(
            ExportWarning(
                f"{capture.model_name} calls {_shown(class_names)}, in {_shown([f.module_path for f in capture.functions])}: "
                "torch.export keeps what forward of a torch.autograd.Function does, and drops its backward. The bundle answers as the "
                "model does, but stagepack.train would use the gradients of forward. To train it, register the function as an operator, by "
                "torch.library.custom_op and register_autograd",
            )
        )


def warn_of_unlisted_operators(capture: Capture, graph: Graph) -> None:
    """Warn if a model uses operators that loaders do not run by default."""
    permissions = sorted(needed_permissions([graph]))
    if permissions:
        model_name = capture.model_name
        warn_caller(
            ExportWarning(
                f"{model_name} uses {_shown(permissions)}, which loaders do not run by default: whoever loads the bundle passes "
                f"allow_ops={permissions} (--allow-ops)",
            )
        )


def _shown(names: list[str] | tuple[str, ...]) -> str:
    distinct = list(dict.fromkeys(name or "the model itself" for name in names))
    more = f" and {len(distinct) - _SHOWN_MODULES} more" if len(distinct) > _SHOWN_MODULES else ""
    return ", ".join(distinct[:_SHOWN_MODULES]) + more
