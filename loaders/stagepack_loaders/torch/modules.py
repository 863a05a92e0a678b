"""The modules of the original model in a stage: under their names, each callable on its own, and replaceable.

A stage is run as the model was: by calls of its modules. Each call takes values of the graph and gives such; between them stand the
arguments and results of Python, as they were at export.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch.fx import GraphModule

from stagepack.errors import InputError
from stagepack.format.contract import Given, bind, check_values
from stagepack.format.dtypes import SCALARS
from stagepack.format.graph import Cost, Graph, ModuleCall, Node, Value, ValueArg
from stagepack.format.names import node_texts, renamed
from stagepack.format.shapes import evaluate, symbols_in
from stagepack.format.signature import Parameter, Signature
from stagepack.format.tree import (
    ConstantLeaf,
    NonFiniteLeaf,
    SequenceTree,
    Tree,
    ValueLeaf,
    constant,
    flatten,
    unflatten,
    value_names,
)
from stagepack.format.walk import given, in_order, values_made, values_used
from stagepack_loaders.torch.build import Builder, FunctionCall, Step, made_by, used_by, values_of

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


def build_modules(
    graph: Graph,
    places: Sequence[int],
    targets: Sequence[Callable[..., Any]],
    device: torch.device,
    types: Collection[type],
) -> tuple[GraphModule, list[Body]]:
    """Make a module of a graph, called as that of `build.build`, and the calls of modules that it makes.

    Args:
        graph: the stage, with the calls of modules.
        places: where each node stands in the whole model; -1 for one that stands nowhere.
        targets: the operators of the op table.
        device: what the graph calls its own device.
        types: classes to build arguments and results of.

    Raises:
        OperatorError, DeviceError: see `build.build`.
    """
    return _Building(graph, targets, device, types).build(places)


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


class _Span(NamedTuple):
    """The nodes of a call of a module: the number of the first, and that after the last."""

    start: int
    end: int
    call: ModuleCall


def _with_weights_by_name(graph: Graph) -> Graph:
    """A graph that calls a weight which it has written by its own name: an operator that writes in place gives back what it wrote.

    So a module that counts its calls in a buffer takes the buffer at each call, not what the call before gave back.
    """
    name_of = {weight.value: weight.value for weight in graph.weights}
    nodes = []
    for node in graph.nodes:
        new = (name_of.get(text, text) for text in node_texts(node))
        nodes.append(replace(renamed(node, new), outputs=node.outputs))
        op = graph.ops[node.op]
        for index, parameter in op.aliases:
            written = parameter in op.mutates and index < len(node.outputs) and not node.unpack
            whole = given(node, op, parameter) if written else None
            output = node.outputs[index] if written else None
            if output is not None and isinstance(whole, ValueArg) and whole.name in name_of:
                name_of[output.name] = name_of[whole.name]
    return replace(graph, nodes=tuple(nodes))


class _Building:
    """A graph on its way to modules."""

    def __init__(
        self, graph: Graph, targets: Sequence[Callable[..., Any]], device: torch.device, types: Collection[type]
    ) -> None:
        self.weights = {weight.value for weight in graph.weights}
        self.graph = graph = _with_weights_by_name(graph)
        self.classes = types
        self.builder = Builder(graph, (), targets, device)
        made = [
            (number, value) for number, node in enumerate(graph.nodes) for value in node.outputs if value is not None
        ]
        self.types = {value.name: value for value in (*graph.inputs, *(value for _, value in made))}
        self.made_at = dict.fromkeys((*self.weights, *(value.name for value in graph.inputs)), -1)
        self.made_at |= {value.name: number for number, value in made}
        self.last_use = {name: number for number, node in enumerate(graph.nodes) for name in values_used(node)}
        self.last_use |= dict.fromkeys(graph.outputs, len(graph.nodes))
        self.owners: dict[tuple[str, bytes], str] = {}
        self.bodies: list[Body] = []

    def build(self, places: Sequence[int]) -> tuple[GraphModule, list[Body]]:
        """The module of the whole graph."""
        graph, at = self.graph, {place: number for number, place in enumerate(places)}
        spans = []
        for call in in_order(graph.calls):
            first, last = at.get(int(call.first)), at.get(int(call.first) + call.nodes - 1)
            if first is not None and last is not None and last - first == call.nodes - 1:
                spans.append(_Span(first, last + 1, call))
        names = [*(value.name for value in graph.inputs), *(weight.value for weight in graph.weights)]
        steps = self._steps(0, len(graph.nodes), spans, None)
        return self.builder.module(names, steps, values_of(graph.outputs), None, "Stage"), self.bodies

    def _steps(self, start: int, end: int, spans: Sequence[_Span], around: Body | None) -> list[Step]:
        """Nodes, and calls in their place; `spans` are those inside, in order."""
        steps: list[Step] = []
        known = self.weights.union((value.name for value in self.graph.inputs) if around is None else around.inputs)
        number = 0
        while start < end:
            if number == len(spans) or spans[number].start != start:
                steps.append(self.graph.nodes[start])
                start += 1
            else:
                span, first = spans[number], number + 1
                number = first
                while number < len(spans) and spans[number].start < span.end:
                    number += 1
                steps.append(self._call(span, spans[first:number], around, known))
                start = span.end
            known.update(made_by(steps[-1]))
        return steps

    def _call(self, span: _Span, inside: Sequence[_Span], around: Body | None, known: Collection[str]) -> FunctionCall:
        """A call of a module, with those `inside` it; `known` are the values that there are before it."""
        start, end, call = span
        nodes = self.graph.nodes[start:end]
        used = dict.fromkeys(name for node in nodes for name in values_used(node) if self.made_at[name] < start)
        needs = [name for name in used if name not in self.weights]
        made = [name for node in nodes for name in values_made(node)]
        used_after = [name for name in made if self.last_use.get(name, -1) >= end]
        signature = call.signature or self._plain_signature(needs, used_after)
        leaves = value_names(*(parameter.tree for parameter in signature.parameters))
        inputs = list(dict.fromkeys((*needs, *(name for name in leaves if name in known))))
        results = {*used_after, *value_names(signature.result), *(() if around is None else around.outputs)}
        body = Body(
            call=call,
            around=around,
            owner=self._owner(call, signature, nodes),
            signature=signature,
            inputs=inputs,
            needs=needs,
            outputs=[name for name in made if name in results],
            weights=[],
            types=self.types,
            stage=self.graph,
            classes=self.classes,
        )
        self.bodies.append(body)
        steps = self._steps(start, end, inside, body)
        own = (name for step in steps for name in used_by(step) if name in self.weights and name not in inputs)
        body.weights.extend(dict.fromkeys(own))
        names = [*inputs, *body.weights]
        body.graph = self.builder.module(names, steps, values_of(body.outputs), None, "Module")
        return FunctionCall(enter, body, inputs, body.outputs, self._context(nodes))

    def _plain_signature(self, needs: Sequence[str], used_after: Sequence[str]) -> Signature:
        """The signature of a call of which the capture did not tell: tensors one by one, as ``torch.export.unflatten`` has it."""
        tensors = [name for name in needs if self.types[name].dtype not in SCALARS]
        parameters = (
            Parameter(name=f"arg_{number}", tree=ValueLeaf(name), positional=True, keyword=False)
            for number, name in enumerate(tensors)
        )
        results: list[Tree] = [ValueLeaf(name) for name in used_after]
        result = results[0] if len(results) == 1 else SequenceTree(kind="tuple", items=tuple(results))
        return Signature(parameters=tuple(parameters), result=result)

    def _owner(self, call: ModuleCall, signature: Signature, nodes: Sequence[Node]) -> str:
        """The path of the module that runs a call: that of the first call with the same graph."""
        path, mark, number = call.path.rpartition("@")
        path = path if mark and number.isdigit() else call.path
        numbers: dict[str, str] = {}

        def plain(name: str) -> str:
            return name if name in self.weights else numbers.setdefault(name, str(len(numbers)))

        same: list[Any] = [signature.renamed(plain)]
        for node in nodes:
            outputs = [None if value is None else plain(value.name) for value in node.outputs]
            bare = replace(node, outputs=(), scope=0, cost=Cost())
            same.append((renamed(bare, map(plain, node_texts(bare))), outputs))
        key = (path, msgspec.msgpack.encode(same))
        known = any(other == path for other, _ in self.owners)
        return self.owners.setdefault(key, call.path if known else path)

    def _context(self, nodes: Sequence[Node]) -> int | None:
        """The innermost context that all nodes stand in."""
        contexts = self.graph.contexts
        common: list[int] | None = None
        for found in {node.context for node in nodes}:
            chain: list[int] = []
            while found is not None:
                chain.insert(0, found)
                found = contexts[found].parent
            common = chain if common is None else [a for a, b in zip(common, chain, strict=False) if a == b]
        return common[-1] if common else None
