"""A call of a module of the model inside a stage.

A stage that is loaded with ``modules=True`` runs as the model did: by calls of its modules. Each call takes values of the graph and
returns values of the graph; between them are the arguments and results of Python, as they were when the model was captured.
"""

from collections.abc import Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from stagepack.errors import InputError
from stagepack.format.contract import BoundArgument, bind_call, check_constant, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Graph, ModuleCall, Value
from stagepack.format.manifest import Signature
from stagepack.format.shapes import evaluate_dim, symbol_names
from stagepack.format.tree import (
    ConstantLeaf,
    NonFiniteLeaf,
    Tree,
    ValueLeaf,
    constant_value,
    flatten_tree,
    unflatten_tree,
)
from stagepack.torch_internals import child_modules
from stagepack_loaders.torch.slots import Slot


@dataclass(slots=True, eq=False)
class ModuleCallBody:
    """One call of a module in a stage.

    Attributes:
        call: its entry in the graph.
        outer: the call that makes it; None if the stage does.
        module_path: the path of the module that runs it.
        signature: the arguments and the result of the call.
        inputs: the names of the values that it is passed by `outer` or the stage.
        required: those of them without which it cannot run.
        outputs: the names of the values that it makes and that are used after it.
        forwarded: the names of inputs and weights that it returns unchanged and that are used after it.
        weights: the names of those that it uses itself or returns, not in modules inside it.
        value_types: all values of the stage, by name.
        stage_graph: the graph of the stage.
        classes: classes to build arguments and results of.
        graph_module: the module that computes the outputs from the inputs and then the weights.
        slots: the slots of the weights.
        module: the module at `module_path`, as it was loaded.
        stage: the stage.
    """

    call: ModuleCall
    outer: "ModuleCallBody | None"
    module_path: str
    signature: Signature
    inputs: list[str]
    required: list[str]
    outputs: list[str]
    forwarded: set[str]
    value_types: Mapping[str, Value]
    stage_graph: Graph
    classes: Collection[type]
    weights: list[str] = field(default_factory=list)
    graph_module: GraphModule | None = None
    slots: list[Slot] = field(default_factory=list)
    module: torch.nn.Module | None = None
    stage: torch.nn.Module | None = None

    def current_module(self) -> torch.nn.Module:
        """Return the module that the call goes to, which the user may have replaced.

        It is looked up from the module around it as it was loaded, which the user may have wrapped into another one.
        """
        module, path = self.stage, self.module_path
        if self.outer is not None and path.startswith(f"{self.outer.module_path}."):
            module, path = self.outer.module, path.removeprefix(f"{self.outer.module_path}.")
        for module_name in path.split("."):
            module = None if module is None else child_modules(module).get(module_name)
        if module is None:
            raise InputError(
                f"the module {self.module_path} was removed: replace it by a module that takes the same call"
            )
        return module

    def arguments(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of the call, from values by name. A value that the stage does not have is None: nothing uses it."""
        args, kwargs = [], {}
        for parameter in self.signature.parameters:
            argument = self._build(parameter.tree, values)
            if parameter.positional:
                args.append(argument)
            else:
                kwargs[parameter.name] = argument
        return args, kwargs

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], outer_values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a call: of its arguments, sizes that these determine, and otherwise those of `outer_values`."""
        bound_arguments = bind_call(self.signature, args, kwargs)
        symbol_sizes = self._check(bound_arguments)
        derived_arguments = {}
        for value_name in self.required:
            expr = self.value_types[value_name].expr
            if value_name in bound_arguments:
                continue
            if expr is not None and set(symbol_names(expr)) <= symbol_sizes.keys():
                derived_arguments[value_name] = BoundArgument(value_name, evaluate_dim(expr, symbol_sizes))
            elif value_name in outer_values:
                derived_arguments[value_name] = BoundArgument(value_name, outer_values[value_name])
        if derived_arguments:
            self._check(bound_arguments | derived_arguments)
        return {
            **outer_values,
            **{value_name: argument.value for value_name, argument in (bound_arguments | derived_arguments).items()},
        }

    def run(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Run on values by name."""
        missing = [value_name for value_name in self.required if value_name not in values]
        if missing:
            raise InputError(
                f"{self.call.path} uses {', '.join(missing)}, which its arguments do not determine: it runs only inside its stage"
            )
        assert self.graph_module is not None
        weights = self._weight_tensors() | {
            value_name: values[value_name] for value_name in self.weights if value_name in values
        }
        results = self.graph_module(*map(values.get, self.inputs), *weights.values())
        outputs = dict(zip(self.outputs, results, strict=True))
        return outputs, self._build(self.signature.result, {**values, **weights, **outputs})

    def outputs_of_result(self, result: Any, values: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs that the result of a module contains, which may be the user's."""
        outputs = {}
        for leaf_location, leaf, element in flatten_tree(
            self.signature.result, result, f"the result of {self.module_path}"
        ):
            if not isinstance(leaf, ValueLeaf):
                if constant_value(leaf) is not None:
                    check_constant(leaf, element, leaf_location)
            elif leaf.name in self.outputs:
                outputs[leaf.name] = BoundArgument(leaf_location, element)
            elif leaf.name in self.forwarded and element is not (values | self._weight_tensors())[leaf.name]:
                raise InputError(
                    f"{leaf_location}: expected the same object that was passed, since later nodes of the stage use it, found another one"
                )
        inputs = {
            value_name: BoundArgument(value_name, values[value_name])
            for value_name in self.required
            if self.value_types[value_name].dtype not in SCALAR_DTYPES
        }
        check_values([self.value_types[value_name] for value_name in (*inputs, *outputs)], inputs | outputs, ())
        return {value_name: argument.value for value_name, argument in outputs.items()}

    def _check(self, bound_arguments: Mapping[str, BoundArgument]) -> dict[str, int]:
        """Check the required values, and others that are there, against their types; return the sizes of symbols."""
        checked = [
            self.value_types[value_name]
            for value_name, argument in bound_arguments.items()
            if value_name in self.value_types and (value_name in self.required or argument.value is not None)
        ]
        return check_values(checked, bound_arguments, self.stage_graph.symbols)

    def _weight_tensors(self) -> dict[str, Any]:
        return {value_name: slot.get() for value_name, slot in zip(self.weights, self.slots, strict=True)}

    def _build(self, tree: Tree, values: Mapping[str, Any]) -> Any:
        def leaf_value(leaf: ValueLeaf | ConstantLeaf | NonFiniteLeaf) -> Any:
            return values.get(leaf.name) if isinstance(leaf, ValueLeaf) else constant_value(leaf)

        return unflatten_tree(tree, leaf_value, self.classes)


@dataclass(slots=True)
class PendingCall:
    """A call on its way from the stage to the module that runs it, with the values by name and then the outputs."""

    body: ModuleCallBody
    values: dict[str, Any]
    outputs: dict[str, Any] | None = None


# The call that the next module to be called belongs to.
pending_call: ContextVar[PendingCall | None] = ContextVar("pending_call", default=None)


def call_module(body: ModuleCallBody, *values: Any) -> tuple[Any, ...]:
    """Call the module that a call goes to."""
    call = PendingCall(body, dict(zip(body.inputs, values, strict=True)))
    args, kwargs = body.arguments(call.values)
    token = pending_call.set(call)
    try:
        result = body.current_module()(*args, **kwargs)
    finally:
        pending_call.reset(token)
    outputs = (call.outputs or {}) | body.outputs_of_result(result, call.values)
    missing = [value_name for value_name in body.outputs if value_name not in outputs]
    if missing:
        raise InputError(
            f"{body.module_path} cannot be replaced: later nodes use {', '.join(missing)}, which it computes and does not return"
        )
    return tuple(outputs[value_name] for value_name in body.outputs)
