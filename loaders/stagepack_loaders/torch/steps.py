"""The steps of a module that is built from a graph: nodes, calls of regions, and calls of functions."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from stagepack.format.graph import Argument, Context, Node, TupleArg, ValueArg
from stagepack.format.traversal import input_names, leaf_arguments, output_names


@dataclass(frozen=True, slots=True)
class RegionStep:
    """A call of a region, with the names of the values that it takes and returns. It has no context: its nodes have theirs."""

    region: int
    inputs: Sequence[str]
    outputs: Sequence[str]
    context: None = None


@dataclass(frozen=True, slots=True)
class FunctionStep:
    """A call of a Python function, which returns a tuple of values.

    Attributes:
        function: the function.
        first_argument: its first argument, any Python object.
        inputs: the names of the values that are its other arguments.
        outputs: the names of the values that it returns.
        context: the context that it runs in.
    """

    function: Callable[..., tuple[object, ...]]
    first_argument: object
    inputs: Sequence[str]
    outputs: Sequence[str]
    context: int | None


Step = Node | RegionStep | FunctionStep


def used_names(step: Step) -> Sequence[str]:
    """Return the names of the values that a step takes, with repeats."""
    return input_names(step) if isinstance(step, Node) else step.inputs


def produced_names(step: Step) -> Iterable[str]:
    """Return the names of the values that a step makes."""
    return output_names(step) if isinstance(step, Node) else step.outputs


def use_counts(steps: Iterable[Step]) -> Counter[str]:
    """Return how often steps use each value."""
    return Counter(value_name for step in steps for value_name in used_names(step))


def argument_names(argument: Argument) -> Iterator[str]:
    """Yield the names of the values in an argument, with repeats."""
    return (leaf.name for leaf in leaf_arguments(argument) if isinstance(leaf, ValueArg))


def tuple_of(value_names: Iterable[str]) -> TupleArg:
    """Return a tuple of values as an argument."""
    return TupleArg(tuple(map(ValueArg, value_names)))


def runs_by_context(
    contexts: Sequence[Context], steps: Sequence[Step], context: int | None
) -> Iterator[tuple[int | None, list[Step]]]:
    """Yield runs of consecutive steps that share a context directly inside another one.

    context: the enclosing context; None for none.
    It yields the context of a run, which is `context` itself or a child of it, and the steps of the run. A region step has no context of
        its own: its run has the context None.
    """
    run: list[Step] = []
    run_context: int | None = None
    for step in steps:
        child = step.context
        while child != context and child is not None and contexts[child].parent != context:
            child = contexts[child].parent
        if run and child != run_context:
            yield run_context, run
            run = []
        run_context = child
        run.append(step)
    if run:
        yield run_context, run
