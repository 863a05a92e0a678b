"""Compare what higher-order operators pass to their subgraphs with what these take, and tell what the operators return (SPEC G16).

No subgraph runs here: its own nodes are compared one by one, so that its inputs and results are what it states.

- What is known of the values of a graph, and the arguments of operators as tensors without memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from stagepack.format.graph import (
    Argument,
    ComplexArg,
    DeviceArg,
    DictArg,
    ListArg,
    Node,
    SliceArg,
    SubgraphArg,
    TupleArg,
    ValueArg,
)
from stagepack.torch_internals import storage_identity
from stagepack_loaders.torch.build import argument_names
from stagepack_loaders.torch.devices import parse_graph_device
from stagepack_loaders.torch.torch_attributes import torch_argument

META = torch.device("meta")
# Under autocast these are cast to one another.
CAST_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class Layout(NamedTuple):
    """Where the elements of a tensor are, in elements of its storage."""

    strides: tuple[int, ...]
    offset: int
    storage_size: int


class Fact(NamedTuple):
    """What is known of a value.

    Attributes:
        kind: the dtype of a tensor, or the class of a Python number.
        content: the sizes of a tensor, or the number; None for a size or number that depends on data.
        layout: of a tensor that is not contiguous in a storage of its own; None also where nothing is known of it. A graph states none.
    """

    kind: torch.dtype | type
    content: Any
    layout: Layout | None = None

    @property
    def is_known(self) -> bool:
        """Whether the value does not depend on data."""
        return self.content is not None and (type(self.content) is not tuple or None not in self.content)


class CallResult(NamedTuple):
    """What is known of what an operator or a subgraph returns.

    Attributes:
        facts: of each value; None for one that is neither tensor nor number. None in place of the list if nothing is known.
        is_sequence: whether it returns a sequence.
        reason: why it refuses its arguments; empty if it does not.
        reshaped: the arguments whose shape or strides it changes, as indices into `input_names` of the node.
        shared: pairs of a result and such an argument, by their indices, that share memory.
    """

    facts: Sequence[Fact | None] | None = None
    is_sequence: bool = False
    reason: str = ""
    reshaped: tuple[int, ...] = ()
    shared: tuple[tuple[int, int], ...] = ()


UNKNOWN_RESULT = CallResult()


class MetaValues:
    """The arguments of operators, with tensors on the device ``meta``."""

    def __init__(self, facts: Mapping[str, Fact], *, is_casting: bool, device: torch.device = META) -> None:
        self._facts = facts
        self._is_casting = is_casting
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}
        self._layouts: dict[str, tuple[object, ...]] = {}

    def argument(self, argument: Argument) -> Any:
        """Return an argument as an operator takes it; None for a tensor whose sizes depend on data."""
        return torch_argument(argument, self._leaf)

    def is_reshaped(self, value_name: str) -> bool:
        """Whether the tensor of a value has another shape or other strides than the one that was passed to an operator."""
        tensor = self._tensors.get(value_name)
        return tensor is not None and _arrangement(tensor) != self._layouts[value_name]

    def shared_memory(self, returned: object, used_names: Sequence[str]) -> tuple[tuple[int, int], ...]:
        """Return which results of an operator share memory with which values that it takes, as `CallResult.shared` has them."""
        memories = {value_name: storage_identity(tensor) for value_name, tensor in self._tensors.items()}
        return tuple(
            (result_index, used_names.index(value_name))
            for result_index, result in enumerate(returned if isinstance(returned, list | tuple) else [returned])
            if isinstance(result, torch.Tensor) and result.layout == torch.strided
            for value_name, memory in memories.items()
            if memory == storage_identity(result)
        )

    def _leaf(self, leaf: Argument) -> Any:
        match leaf:
            case ValueArg(name):
                fact = self._facts[name]
                return self._tensor(name, fact) if isinstance(fact.kind, torch.dtype) else fact.content
            case ComplexArg(real, imag):
                return complex(real, imag)
            case DeviceArg(name):
                if name is not None:
                    parse_graph_device(name)
                return self._device
            case _:
                return leaf

    def _tensor(self, value_name: str, fact: Fact) -> torch.Tensor | None:
        """The tensor of a value, the same for each use: an operator may write one of its arguments. None if its sizes depend on data."""
        if value_name not in self._tensors and fact.is_known:
            dtype = torch.float32 if self._is_casting and fact.kind in CAST_DTYPES else fact.kind
            self._tensors[value_name] = tensor = _empty(fact, dtype, self._device)  # type: ignore[arg-type]
            self._layouts[value_name] = _arrangement(tensor)
        return self._tensors.get(value_name)


def _empty(fact: Fact, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if fact.layout is None:
        return torch.empty(fact.content, dtype=dtype, device=device)
    strides, offset, storage_size = fact.layout
    return torch.empty(storage_size, dtype=dtype, device=device).as_strided(fact.content, strides, offset)


def _arrangement(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def argument_key(argument: Argument, facts: Mapping[str, Fact]) -> object:
    """A key that is equal for arguments that operators treat alike, as far as types and shapes go."""
    if isinstance(argument, ValueArg):
        return facts[argument.name]
    if isinstance(argument, ListArg | TupleArg):
        return (type(argument), *[argument_key(item, facts) for item in argument.items])
    if isinstance(argument, DictArg | SliceArg):
        return (argument, *[facts[value_name] for value_name in argument_names(argument)])
    return (type(argument), argument)


def fact_of(value: object) -> Fact | None:
    """Return what is known of a result; None if it is neither a tensor nor a number."""
    if isinstance(value, torch.Tensor):
        return Fact(value.dtype, tuple(value.shape), _layout(value))
    return Fact(type(value), value) if isinstance(value, bool | int | float) else None


def _layout(tensor: torch.Tensor) -> Layout | None:
    if tensor.layout is not torch.strided:
        return None
    storage_size = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.is_contiguous() and storage_size == tensor.numel():
        return None
    return Layout(tensor.stride(), int(tensor.storage_offset()), storage_size)


def describe_fact(fact: Fact) -> str:
    """Return a fact as text, such as ``float32 [2, ?]``."""
    if isinstance(fact.kind, torch.dtype):
        sizes = ", ".join("?" if size is None else str(size) for size in fact.content)
        return f"{str(fact.kind).removeprefix('torch.')} [{sizes}]"
    return fact.kind.__name__ if fact.content is None else f"{fact.kind.__name__} {fact.content}"


def is_fitting(fact: Fact, stated: Fact, *, is_casting: bool) -> bool:
    """Whether a value is what a graph states, as far as both are known. Inside autocast, dtypes that are cast to one another are alike."""
    if fact.kind is not stated.kind and not (is_casting and fact.kind in CAST_DTYPES and stated.kind in CAST_DTYPES):
        return False
    if fact.content == stated.content or fact.content is None or stated.content is None:
        return True
    if type(fact.content) is not tuple or type(stated.content) is not tuple:
        return False
    return len(fact.content) == len(stated.content) and all(
        None in (size, expected) or size == expected
        for size, expected in zip(fact.content, stated.content, strict=True)
    )


_Facts = Sequence[Fact | None]


class SubgraphFacts(NamedTuple):
    """What a subgraph takes, by name, and returns."""

    inputs: Mapping[str, Fact]
    result: CallResult


class _MisfitError(Exception):
    """A call does not fit its subgraphs."""


def subgraph_result(result: Argument, facts: Mapping[str, Fact]) -> CallResult:
    """Return what is known of the result of a subgraph."""
    return CallResult(_facts_of_items(result, facts), is_sequence=isinstance(result, ListArg | TupleArg))


def call_subgraphs(
    operator_name: str, node: Node, facts: Mapping[str, Fact], subgraphs: Sequence[SubgraphFacts], *, is_casting: bool
) -> CallResult:
    """Return what a higher-order operator returns, with a reason if the call does not fit the subgraphs.

    Nothing is known of `flex_attention`, whose kernel decides what the subgraphs get.
    """
    call = _Call(facts, subgraphs, is_casting)
    try:
        match operator_name.removeprefix("higher_order."), node.args:
            case "cond", (_, true_body, false_body, operands):
                return call.run_branch(true_body, false_body, operands)
            case "while_loop", (condition, body, carried, additional):
                return call.run_loop(condition, body, carried, additional)
            case "map_impl", (body, mapped, additional):
                return call.run_map(body, mapped, additional)
            case "scan", (body, carried, scanned, additional):
                return call.run_scan(body, carried, scanned, additional)
            case "associative_scan", (_, scanned, _):
                return CallResult(call.facts_of(scanned), is_sequence=True)
            case "invoke_subgraph", (body, _, *operands):
                return call.run(body, call.facts_of(ListArg(tuple(operands))))
            case "flex_attention", _:
                return UNKNOWN_RESULT
    except _MisfitError as misfit:
        return CallResult(reason=str(misfit))
    return CallResult(reason=f"it does not take {len(node.args)} arguments by position")


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a higher-order operator. All methods raise `_MisfitError`."""

    facts: Mapping[str, Fact]
    subgraphs: Sequence[SubgraphFacts]
    is_casting: bool

    def run_branch(self, true_body: Argument, false_body: Argument, operands: Argument) -> CallResult:
        passed = self.facts_of(operands)
        return self._merge(self.run(true_body, passed), self.run(false_body, passed))

    def run_loop(self, condition: Argument, body: Argument, carried: Argument, additional: Argument) -> CallResult:
        """Each turn takes what the turn before has returned."""
        first, further_facts = self.facts_of(carried), self.facts_of(additional)
        returned = _result_facts(self.run(body, [*first, *further_facts]))
        self.run(body, [*returned, *further_facts])
        self.run(condition, [*first, *further_facts])
        self.run(condition, [*returned, *further_facts])
        return self._merge(CallResult(first, is_sequence=True), CallResult(returned))

    def run_map(self, body: Argument, mapped: Argument, additional: Argument) -> CallResult:
        size, slices = self._slices(mapped)
        returned = self.run(body, [*slices, *self.facts_of(additional)])
        return CallResult(_stack(size, _result_facts(returned)), returned.is_sequence)

    def run_scan(self, body: Argument, carried: Argument, scanned: Argument, additional: Argument) -> CallResult:
        """Each turn takes what the turn before has carried on, and a slice; what else it returns is stacked."""
        first, further_facts = self.facts_of(carried), self.facts_of(additional)
        size, slices = self._slices(scanned)
        returned = _result_facts(self.run(body, [*first, *slices, *further_facts]))
        carry, stacked = returned[: len(first)], _stack(size, returned[len(first) :])
        self.run(body, [*carry, *slices, *further_facts])
        merged = self._merge(CallResult(first), CallResult(carry))
        return CallResult([*_result_facts(merged), *stacked], is_sequence=True)

    def run(self, body: Argument, passed: _Facts) -> CallResult:
        """What a subgraph returns for arguments, which are compared with what it takes."""
        if not isinstance(body, SubgraphArg):
            raise _MisfitError("it passes no subgraph where the operator takes one")
        subgraph_facts = self.subgraphs[body.index]
        if len(passed) != len(subgraph_facts.inputs):
            raise _MisfitError(
                f"the subgraph {body.index} takes {len(subgraph_facts.inputs)} values, the operator passes {len(passed)}"
            )
        for (input_name, stated), fact in zip(subgraph_facts.inputs.items(), passed, strict=True):
            if fact is None or not is_fitting(fact, stated, is_casting=self.is_casting):
                raise _MisfitError(
                    f"the subgraph {body.index} takes {input_name} as {describe_fact(stated)}, the operator passes {_describe(fact)}"
                )
        return subgraph_facts.result

    def facts_of(self, items: Argument) -> _Facts:
        """What the items of a list or tuple are."""
        if not isinstance(items, ListArg | TupleArg):
            raise _MisfitError("it passes no list or tuple where the operator takes one")
        return _facts_of_items(items, self.facts)

    def _slices(self, items: Argument) -> tuple[int | None, _Facts]:
        """The size of the first dimension of tensors, and what one of their slices is."""
        facts = self.facts_of(items)
        tensors = [fact for fact in facts if fact is not None and isinstance(fact.kind, torch.dtype) and fact.content]
        sizes = {fact.content[0] for fact in tensors} - {None}
        if len(tensors) != len(facts) or not facts or len(sizes) > 1:
            raise _MisfitError("it passes no tensors of one size where the operator takes slices of tensors")
        slices = [Fact(fact.kind, fact.content[1:]) for fact in tensors]
        return next(iter(sizes), None), slices

    def _merge(self, first: CallResult, second: CallResult) -> CallResult:
        """What is known of a result that is one of two."""
        first_facts, second_facts = _result_facts(first), _result_facts(second)
        if len(first_facts) != len(second_facts):
            raise _MisfitError(f"one result has {len(first_facts)} values, the other one {len(second_facts)}")
        merged = [self._merge_facts(*facts) for facts in zip(first_facts, second_facts, strict=True)]
        return CallResult(merged, first.is_sequence)

    def _merge_facts(self, first: Fact | None, second: Fact | None) -> Fact | None:
        if first == second:
            return first
        if first is None or second is None or not _are_alike(first, second, is_casting=self.is_casting):
            raise _MisfitError(f"one result is {_describe(first)}, the other one {_describe(second)}")
        if type(first.content) is not tuple:
            return Fact(first.kind, None)
        sizes = zip(first.content, second.content, strict=True)
        return Fact(first.kind, tuple([size if size == second_size else None for size, second_size in sizes]))


def _facts_of_items(argument: Argument, facts: Mapping[str, Fact]) -> _Facts:
    """What an argument is, or what its items are."""
    items = argument.items if isinstance(argument, ListArg | TupleArg) else (argument,)
    return [_fact_of_item(item, facts) for item in items]


def _fact_of_item(item: Argument, facts: Mapping[str, Fact]) -> Fact | None:
    if isinstance(item, ValueArg):
        return facts[item.name]
    return Fact(type(item), item) if isinstance(item, bool | int | float) else None


def _result_facts(result: CallResult) -> _Facts:
    return result.facts or ()


def _stack(size: int | None, facts: _Facts) -> _Facts:
    """What tensors are that are stacked."""
    if not all(fact is None or isinstance(fact.kind, torch.dtype) for fact in facts):
        raise _MisfitError("the subgraph returns a number where the operator takes a tensor")
    return [None if fact is None else Fact(fact.kind, (size, *fact.content)) for fact in facts]


def _are_alike(first: Fact, second: Fact, *, is_casting: bool) -> bool:
    """Whether two values are of one type and number of dimensions."""
    return is_fitting(_sizeless(first), _sizeless(second), is_casting=is_casting)


def _sizeless(fact: Fact) -> Fact:
    return Fact(fact.kind, (None,) * len(fact.content) if type(fact.content) is tuple else None)


def _describe(fact: Fact | None) -> str:
    return "nothing" if fact is None else describe_fact(fact)
