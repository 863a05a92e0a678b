"""Warnings of an export: training mode by mistake, a lost backward, operators that need `allow_ops`, other defaults."""

import inspect
import reprlib
from collections.abc import Sequence

import msgspec

from stagepack.capture.module_checkpoint import shown
from stagepack.capture.programs import Capture
from stagepack.errors import ExportWarning, InputError, warn_caller
from stagepack.format.contract import bind_call
from stagepack.format.operators import needed_permissions
from stagepack.format.tree import Signature, value_names
from stagepack.graph.analysis import GraphAnalysis
from stagepack.linearize import LinearizedProgram

# Buffers of torch's batch norms, in training mode updated by each call.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def warn_of_export(capture: Capture, program: LinearizedProgram) -> None:
    """Warn of what will be missed when the bundle is used."""
    _warn_of_training_mode(capture, program)
    _warn_of_lost_backward(capture)
    _warn_of_unlisted_operators(capture, program)
    _warn_of_other_defaults(capture, program)


def _warn_of_training_mode(capture: Capture, program: LinearizedProgram) -> None:
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
    statistics = [weight for weight in GraphAnalysis(graph).written_weight_names if weight.endswith(_STATISTICS)]
    reasons = []
    if dropouts:
        reasons.append(f"drops values at random ({_shown(dropouts)})")
    if statistics:
        reasons.append(f"updates statistics of batches ({_shown(statistics)})")
    if reasons:
        message = (
            f"{capture.model_name} is exported in training mode: each call {' and '.join(reasons)}. Call model.eval() before the "
            "export (--eval), unless the bundle is to be trained"
        )
        warn_caller(ExportWarning(message))


def _warn_of_lost_backward(capture: Capture) -> None:
    """Warn if a model calls functions with a backward of their own, which torch does not capture."""
    if capture.functions:
        class_names = [function.class_name for function in capture.functions]
        message = (
            f"{capture.model_name} calls {_shown(class_names)}, in {_shown([f.module_path for f in capture.functions])}: "
            "torch.export keeps what forward of a torch.autograd.Function does, and drops its backward. The bundle answers as the "
            "model does, but stagepack.train would use the gradients of forward. To train it, register the function as an operator, by "
            "torch.library.custom_op and register_autograd"
        )
        warn_caller(ExportWarning(message))


def _warn_of_unlisted_operators(capture: Capture, program: LinearizedProgram) -> None:
    """Warn if a model uses operators that loaders do not run by default."""
    permissions = sorted(needed_permissions([program.graph]))
    if permissions:
        message = (
            f"{capture.model_name} uses {_shown(permissions)}, which loaders do not run by default: whoever loads the bundle passes "
            f"allow_ops={permissions} (--allow-ops)"
        )
        warn_caller(ExportWarning(message))


def _warn_of_other_defaults(capture: Capture, program: LinearizedProgram) -> None:
    """Warn if the example passes other constants than the defaults of the model: calls that pass none are computed with its constants."""
    declared = {} if capture.model is None else inspect.signature(capture.model.forward).parameters
    differing = []
    for parameter in program.signature.parameters:
        default = declared[parameter.name].default if parameter.name in declared else inspect.Parameter.empty
        # None says that the model chooses, as by its configuration.
        if default is inspect.Parameter.empty or default is None or any(value_names(parameter.tree)):
            continue
        signature = Signature(
            parameters=(msgspec.structs.replace(parameter, keyword=True),), result=program.signature.result
        )
        try:
            bind_call(signature, (), {parameter.name: default})
        except InputError:
            differing.append(f"{parameter.name}, whose default is {reprlib.repr(default)}")
    if differing:
        message = (
            f"{capture.model_name}: the example passes another constant than the default of {_shown(differing)}. The bundle computes with "
            "the constant of the example, also in calls that leave it out"
        )
        warn_caller(ExportWarning(message))


def _shown(names: Sequence[str]) -> str:
    return shown(dict.fromkeys(name or "the model itself" for name in names))
