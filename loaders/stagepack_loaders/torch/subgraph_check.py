"""Compare what higher-order operators pass to their subgraphs with what these take, and tell what the operators return (SPEC G16).

No subgraph runs here: its own nodes are compared one by one, so that its inputs and results are what it states.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from stagepack.format.graph import (
    Argument,
    ListArg,
    Node,
    SubgraphArg,
    TupleArg,
    ValueArg,
)
from stagepack_loaders.torch.value_facts import UNKNOWN_RESULT, CallResult, Fact, describe_fact, is_fitting

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
