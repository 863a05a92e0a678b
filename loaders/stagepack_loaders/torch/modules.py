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
from stagepack.format.contract import Given, bind, check_values
from stagepack.format.graph import Graph, ModuleCall, Value
from stagepack.format.shapes import evaluate, symbols_in
from stagepack.format.signature import Signature
from stagepack.format.tree import (
    ConstantLeaf,
    NonFiniteLeaf,
    Tree,
    ValueLeaf,
    constant,
    flatten,
    unflatten,
)

# Where a weight is looked up at each call: a dict, and its key.
Slot = tuple[dict[str, Any], str]


class Container(torch.nn.Module):
    """A module that cannot be called: it holds weights and other modules, ``layers[3]`` is the one with the name ``3``."""

    def __getitem__(self, name: int | str) -> torch.nn.Module:
        """The module of that name."""
        return self.get_submodule(str(name))

    def __setitem__(self, name: int | str, module: torch.nn.Module) -> None:
        """Put a module in the place of the one of that name."""
        self.get_submodule(str(name))
        self._modules[str(name)] = module

    def __iter__(self) -> Iterator[torch.nn.Module]:
        """The modules directly inside."""
        return self.children()

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

    def __init__(self, bodies: list["Body"]) -> None:
        """`bodies` are its calls, the first one is that which is run when a caller calls it."""
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
        if entry is not None and any(entry.body is body for body in self._bodies):
            _entered.set(None)  # it is for this call alone
            given = entry.given | entry.body.bound(args, kwargs)
            entry.made = entry.body.run(given)
            return entry.body.result(given | entry.made)
        body = self._bodies[0]
        given = body.bound_alone(args, kwargs)
        return body.result(given | body.run(given))


@dataclass(slots=True, eq=False)
class Body:
    """One call of a module in a stage.

    Attributes:
        call: what the graph says of it.
        around: the call that makes it; None when the stage does.
        owner: the path of the module that runs it.
        signature: as it was called.
        inputs: the names of the values that it is given by what runs around it.
        needs: those of them without which it cannot run.
        outputs: the names of the values that it gives.
        weights: the names of those that it uses itself, not in modules inside of it.
    """

    call: ModuleCall
    around: "Body | None"
    owner: str
    signature: Signature
    inputs: list[str]
    needs: list[str]
    outputs: list[str]
    weights: list[str]
    types: Mapping[str, Value]
    stage: Graph
    classes: Collection[type]
    graph: GraphModule | None = None
    slots: list[Slot] = field(default_factory=list)
    module: Module | None = None
    root: torch.nn.Module | None = None

    def find(self) -> torch.nn.Module:
        """The module that stands where this call goes to; it may be the user's."""
        found, path = self.root, self.owner
        if self.around is not None and path.startswith(f"{self.around.owner}."):
            found, path = self.around.module, path.removeprefix(f"{self.around.owner}.")
        for name in path.split("."):
            found = None if found is None else found._modules.get(name)
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

    def result(self, known: Mapping[str, Any]) -> Any:
        """What the module gives back."""
        return self._build(self.signature.result, known)

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The values that arguments hold."""
        return {name: given.value for name, given in bind(self.signature, args, kwargs).items()}

    def bound_alone(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The values that arguments hold which a caller gives, checked, and the sizes that they tell."""
        bound = bind(self.signature, args, kwargs)
        types = [self.types[name] for name in bound if name in self.types]
        sizes = check_values(types, bound, self.stage.symbols)
        given = {name: argument.value for name, argument in bound.items()}
        for name in self.needs:
            expr = self.types[name].expr
            if name not in given and expr is not None and set(symbols_in(expr)) <= sizes.keys():
                given[name] = evaluate(expr, sizes)
        return given

    def run(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Run on values by name; return the outputs."""
        missing = [name for name in self.needs if name not in given]
        if missing:
            raise InputError(
                f"{self.call.path} uses {', '.join(missing)}, which its arguments do not give: it runs only inside of its stage"
            )
        assert self.graph is not None
        weights = (given.get(name, held[key]) for name, (held, key) in zip(self.weights, self.slots, strict=True))
        return dict(zip(self.outputs, self.graph(*map(given.get, self.inputs), *weights), strict=True))

    def given_back(self, result: Any) -> dict[str, Any]:
        """The outputs in what the module gave back, which may be the user's.

        Raises:
            InputError: it is not what the original gives back.
        """
        places = flatten(self.signature.result, result, f"the result of {self.owner}")
        found = {
            leaf.name: Given(place, part)
            for place, leaf, part in places
            if isinstance(leaf, ValueLeaf) and leaf.name in self.outputs
        }
        check_values([self.types[name] for name in found], found, ())
        return {name: given.value for name, given in found.items()}

    def _build(self, tree: Tree, known: Mapping[str, Any]) -> Any:
        def leaf(found: ValueLeaf | ConstantLeaf | NonFiniteLeaf) -> Any:
            return known.get(found.name) if isinstance(found, ValueLeaf) else constant(found)

        return unflatten(tree, leaf, self.classes)


@dataclass(slots=True)
class _Entry:
    """A call of a module on its way from the stage to the module."""

    body: Body
    given: dict[str, Any]
    made: dict[str, Any] | None = None


_entered: ContextVar[_Entry | None] = ContextVar("entered", default=None)


def enter(body: Body, *values: Any) -> tuple[Any, ...]:
    """Call the module that stands where a call goes to, with the values of the graph; return those that it makes."""
    entry = _Entry(body, dict(zip(body.inputs, values, strict=True)))
    args, kwargs = body.arguments(entry.given)
    token = _entered.set(entry)
    try:
        result = body.find()(*args, **kwargs)
    finally:
        _entered.reset(token)
    made = (entry.made or {}) | body.given_back(result)
    missing = [name for name in body.outputs if name not in made]
    if missing:
        raise InputError(
            f"{body.owner} cannot be replaced: what follows uses {', '.join(missing)}, made inside of it and not given back"
        )
    return tuple(made[name] for name in body.outputs)


def attach(stage: torch.nn.Module, bodies: Sequence[Body], slots: Mapping[str, Slot]) -> None:
    """Tell calls where the modules and the weights of their stage are."""
    for body in bodies:
        body.root = stage
        body.slots = [slots[name] for name in body.weights]


def module_tree(bodies: Iterable[Body]) -> list[tuple[str, Module]]:
    """The modules that run calls, with their paths; one that others stand in comes before these."""
    of: dict[str, list[Body]] = {}
    for body in bodies:
        of.setdefault(body.owner, []).append(body)
    return [(path, Module(of[path])) for path in sorted(of, key=lambda path: path.count("."))]
