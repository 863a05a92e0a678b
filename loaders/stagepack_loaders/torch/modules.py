"""The modules of the original model in a stage: under their names, each callable on its own, and replaceable.

A stage is run as the model was: by calls of its modules. Each call takes values of the graph and gives such; between them stand the
arguments and results of Python, as they were at export.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from stagepack.errors import InputError
from stagepack.format.contract import BoundArgument, bind_call, check_constant, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Graph, ModuleCall, Value
from stagepack.format.shapes import evaluate_dim, symbol_names
from stagepack.format.signature import Signature
from stagepack.format.traversal import split_call_path
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


class Container(torch.nn.Module):
    """A module that cannot be called: it holds weights and other modules, ``layers[3]`` is the one with the name ``3``."""

    _called: frozenset[str] = frozenset()  # names of the modules directly inside that the stage calls

    def __getitem__(self, name: int | str) -> torch.nn.Module:
        """The module of that name directly inside."""
        found = self._modules.get(str(name))
        if found is None:
            raise KeyError(f"there is no module {str(name)!r} here, but {', '.join(self._modules) or 'none at all'}")
        return found

    def __setitem__(self, name: int | str, module: torch.nn.Module) -> None:
        """Put a module in the place of the one of that name."""
        setattr(self, str(name), module)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        """The modules directly inside; where their names are numbers, in the order of these."""
        return self.children()

    def __setattr__(self, name: str, value: Any) -> None:
        """Put a module in the place of one that the stage calls, or set any other attribute.

        Raises:
            InputError: the stage would not call the module.
        """
        if name in self._called and isinstance(value, torch.nn.Module):
            self._modules[name] = value
        elif isinstance(value, torch.nn.Module):
            raise InputError(
                f"the stage would not call what stands at {name!r}: a module can be replaced where the model calls it, "
                "outside of branches and loops, it does something, it lies whole in the stage, and modules=True was given"
            )
        else:
            super().__setattr__(name, value)

    def settle(self) -> None:
        """Put the modules inside in order, now that they are all there, and know which of them are called."""
        self._called = frozenset(name for name, child in self._modules.items() if isinstance(child, Module))
        if all(split_call_path(name)[0].isdecimal() for name in self._modules):
            for name in sorted(self._modules, key=lambda name: (int(split_call_path(name)[0]), name)):
                self._modules[name] = self._modules.pop(name)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse the call."""
        raise InputError(
            "this module cannot be called: the model does not call it, or it does not lie whole in this stage, "
            "or the stage was not loaded with modules=True"
        )


class Module(Container):
    """A module of the model: it is called as it was at export.

    Inside of its stage it is also given what it uses and was not given at export; on its own it runs without where it can.
    """

    def __init__(self, bodies: list["ModuleCallBody"]) -> None:
        """`bodies` are its calls, which have equal graphs."""
        super().__init__()
        self._bodies = bodies
        for body in bodies:
            body.module = self

    def _get_name(self) -> str:
        return self._bodies[0].call.type.rpartition(".")[2] or type(self).__name__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module.

        Raises:
            InputError: an argument is missing, unknown, or does not fit what it was at export; or it uses what no argument gives.
        """
        entry = _entered.get()
        if entry is None or not any(entry.body is body for body in self._bodies):
            body = self._fitting(args, kwargs)
            return body.run(body.values(args, kwargs, {}))[1]
        _entered.set(None)  # it is for this call alone
        entry.made, result = entry.body.run(entry.body.values(args, kwargs, entry.given))
        return result

    def _fitting(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "ModuleCallBody":
        """The first call that took such arguments, else the first one: they may differ in sizes that are fixed."""
        for body in self._bodies[1:] and self._bodies:
            try:
                body.values(args, kwargs, {})
            except InputError:
                continue
            return body
        return self._bodies[0]


@dataclass(slots=True, eq=False)
class ModuleCallBody:
    """One call of a module in a stage.

    Attributes:
        call: what the graph says of it.
        around: the call that makes it; None when the stage does.
        owner: the path of the module that runs it.
        signature: as it was called.
        inputs: the names of the values that it is given by what runs around it.
        needs: those of them without which it cannot run.
        outputs: the names of the values that it gives.
        passed: what it gives back and does not make, and what is used after it: inputs and weights.
        weights: the names of those that it uses itself or gives back, not in modules inside of it.
        types: all values of the stage.
        stage: the graph of the stage.
        classes: to build arguments and results of.
        graph: what runs; it takes the inputs, then the weights, and returns the outputs.
        slots: where the weights are.
        module: that runs it, unless the user has put another one there.
        root: the stage.
    """

    call: ModuleCall
    around: "ModuleCallBody | None"
    owner: str
    signature: Signature
    inputs: list[str]
    needs: list[str]
    outputs: list[str]
    passed: set[str]
    weights: list[str]
    types: Mapping[str, Value]
    stage: Graph
    classes: Collection[type]
    graph: GraphModule | None = None
    slots: list[Slot] = field(default_factory=list)
    module: Module | None = None
    root: torch.nn.Module | None = None

    def find(self) -> torch.nn.Module:
        """The module that stands where this call goes to; it may be the user's.

        It is looked up from the module around it as it was loaded, which the user may have wrapped into another one.
        """
        found, path = self.root, self.owner
        if self.around is not None and path.startswith(f"{self.around.owner}."):
            found, path = self.around.module, path.removeprefix(f"{self.around.owner}.")
        for name in path.split("."):
            found = None if found is None else child_modules(found).get(name)
        if found is None:
            raise InputError(f"there is no module {self.owner} any more: put one there that takes the same call")
        return found

    def arguments(self, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """What the module is called with; None for a value that the stage does not have, since nothing uses it."""
        args, kwargs = [], {}
        for parameter in self.signature.parameters:
            argument = self._build(parameter.tree, given)
            if parameter.positional:
                args.append(argument)
            else:
                kwargs[parameter.name] = argument
        return args, kwargs

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], around: Mapping[str, Any]) -> dict[str, Any]:
        """The values that a call gives, checked: of its arguments, sizes that these tell, and else what is known around it."""
        bound = bind_call(self.signature, args, kwargs)
        sizes = self._check(bound)
        hidden = {}
        for name in self.needs:
            expr = self.types[name].expr
            if name in bound:
                continue
            if expr is not None and set(symbol_names(expr)) <= sizes.keys():
                hidden[name] = BoundArgument(name, evaluate_dim(expr, sizes))
            elif name in around:
                hidden[name] = BoundArgument(name, around[name])
        if hidden:
            self._check(bound | hidden)
        return {**around, **{name: given.value for name, given in (bound | hidden).items()}}

    def _check(self, given: Mapping[str, BoundArgument]) -> dict[str, int]:
        """Check values that it needs, and others that there are, against their types; return the sizes of symbols."""
        names = [name for name in given if name in self.types and (name in self.needs or given[name].value is not None)]
        return check_values([self.types[name] for name in names], given, self.stage.symbols)

    def run(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Run on values by name; return the outputs by name, and what the module gives back."""
        missing = [name for name in self.needs if name not in given]
        if missing:
            raise InputError(
                f"{self.call.path} uses {', '.join(missing)}, which its arguments do not give: it runs only inside of its stage"
            )
        assert self.graph is not None
        weights = self._held() | {name: given[name] for name in self.weights if name in given}
        made = dict(zip(self.outputs, self.graph(*map(given.get, self.inputs), *weights.values()), strict=True))
        return made, self._build(self.signature.result, {**given, **weights, **made})

    def _held(self) -> dict[str, Any]:
        return {name: slot.get() for name, slot in zip(self.weights, self.slots, strict=True)}

    def given_back(self, result: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs in what the module gave back, which may be the user's; `given` is what the call went with.

        Raises:
            InputError: it is not what the original gives back.
        """
        found = {}
        for place, leaf, part in flatten_tree(self.signature.result, result, f"the result of {self.owner}"):
            if not isinstance(leaf, ValueLeaf):
                if constant_value(leaf) is not None:
                    check_constant(leaf, part, place)
            elif leaf.name in self.outputs:
                found[leaf.name] = BoundArgument(place, part)
            elif leaf.name in self.passed and part is not {**given, **self._held()}[leaf.name]:
                raise InputError(
                    f"{place}: expected the very value that was given, which others use too: the stage runs on with it"
                )
        around = {
            name: BoundArgument(name, given[name]) for name in self.needs if self.types[name].dtype not in SCALAR_DTYPES
        }
        check_values([self.types[name] for name in (*around, *found)], around | found, ())
        return {name: part.value for name, part in found.items()}

    def _build(self, tree: Tree, known: Mapping[str, Any]) -> Any:
        def leaf(found: ValueLeaf | ConstantLeaf | NonFiniteLeaf) -> Any:
            return known.get(found.name) if isinstance(found, ValueLeaf) else constant_value(found)

        return unflatten_tree(tree, leaf, self.classes)


@dataclass(slots=True)
class _Entry:
    """A call of a module on its way from the stage to the module."""

    body: ModuleCallBody
    given: dict[str, Any]
    made: dict[str, Any] | None = None


_entered: ContextVar[_Entry | None] = ContextVar("entered", default=None)


def enter(body: ModuleCallBody, *values: Any) -> tuple[Any, ...]:
    """Call the module that stands where a call goes to, with the values of the graph; return those that it makes."""
    entry = _Entry(body, dict(zip(body.inputs, values, strict=True)))
    args, kwargs = body.arguments(entry.given)
    token = _entered.set(entry)
    try:
        result = body.find()(*args, **kwargs)
    finally:
        _entered.reset(token)
    made = (entry.made or {}) | body.given_back(result, entry.given)
    missing = [name for name in body.outputs if name not in made]
    if missing:
        raise InputError(
            f"{body.owner} cannot be replaced: what follows uses {', '.join(missing)}, made inside of it and not given back"
        )
    return tuple(made[name] for name in body.outputs)


def attach(stage: Container, bodies: Sequence[ModuleCallBody], slots: Mapping[str, Slot]) -> None:
    """Tell calls where the modules and the weights of their stage are, and modules which of those inside them are called."""
    for body in bodies:
        body.root = stage
        body.slots = [slots[name] for name in body.weights]
    for module in stage.modules():
        if isinstance(module, Container):
            module.settle()


def module_tree(bodies: Iterable[ModuleCallBody]) -> list[tuple[str, Module]]:
    """The modules that run calls, with their paths; one that others stand in comes before these."""
    of: dict[str, list[ModuleCallBody]] = {}
    for body in bodies:
        of.setdefault(body.owner, []).append(body)
    return [(path, Module(of[path])) for path in sorted(of, key=lambda path: path.count("."))]
