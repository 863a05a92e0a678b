"""Run a model and its captured program at sizes other than the sizes of the example, and compare what they answer.

torch traces a program for sizes of 2 and more, and takes the same program for 0 and 1 where the caller declares them: whether that is
right, and whether the shapes that it states hold at the ends of a range, is known when it has run there.
"""

import enum
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.func import functional_call

from stagepack.capture.inputs import Inputs
from stagepack.capture.model_runs import EXAMPLE_SEED, are_identical, preserve_tensors, run_model
from stagepack.capture.programs import Capture
from stagepack.capture.torch_messages import describe_error, suppress_warnings
from stagepack.errors import CaptureError
from stagepack.format.contract import bind_call
from stagepack.format.graph import Value
from stagepack.format.operators import unsafe_operators
from stagepack.format.shapes import Dim, Symbol, evaluate_dim, format_guard, guard_holds, symbol_names
from stagepack.graph.analysis import GraphAnalysis
from stagepack.linearize.declared_sizes import DeclaredDimension
from stagepack.linearize.observed_shapes import Observed, ObservedRun, Point, RankError, UnsafeArgumentsError
from stagepack.linearize.program import LinearizedProgram
from stagepack.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    call_leaves,
    call_of_leaves,
    suppress_log_records,
    tree_leaves,
)

# The work of all trials of a program: floating-point operations, and as many for each byte that is read or written and for each node as
# take about the same time. The count does not depend on the machine, so that the same export gives the same bytes.
_MAX_WORK: Final = 1e11
_WORK_OF_BYTE, _WORK_OF_NODE = 4, 200_000
# How many bytes of weights that are in files are read for trials.
_MAX_READ_BYTES: Final = 2**30
# How many points are looked at for one that all guards admit, and how far from the example.
_MAX_POINTS, _MAX_DISTANCE = 1_024, 32


class Verdict(enum.Enum):
    """How a captured program answers at some sizes."""

    EQUAL = enum.auto()
    DIFFERS = enum.auto()
    PROGRAM_FAILS = enum.auto()  # and the model answers
    MODEL_FAILS = enum.auto()  # and its program answers
    BOTH_FAIL = enum.auto()
    REFUSED = enum.auto()  # by a guard
    UNKNOWN = enum.auto()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial found."""

    verdict: Verdict
    # Why it is not `EQUAL`, as the end of a sentence.
    reason: str = ""
    # The sizes that differ from those that the graph states.
    observed: Observed = field(default_factory=dict)


class _ModelWithData(torch.nn.Module):
    """A model whose weights have no data, called with data in their place."""

    def __init__(self, model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self._data = {tensor_name: weights[tensor_name] for tensor_name, _ in tensors if tensor_name in weights}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.model, self._data, args, kwargs)


class SizeTrial:
    """Trials of one captured program, each of which leaves the model as it was."""

    def __init__(self, capture: Capture, program: LinearizedProgram) -> None:
        self._capture = capture
        self._program = program
        self._exported = program.exported
        self._values = list(_input_values(program))
        self._outcomes: dict[tuple[tuple[str, int], ...], Outcome] = {}
        self._fake_weights: tuple[FakeTensorMode, dict[str, torch.Tensor]] | None = None
        # nll_loss_backward reads past the end of its inputs where a target is out of range.
        self._unsafe_operators = unsafe_operators([program.graph])
        costs = [node.cost for node in program.graph.nodes]
        self._example_work = sum(cost.flops + _WORK_OF_BYTE * cost.bytes for cost in costs)
        self._remaining_work = _MAX_WORK
        self._model = capture.model
        self._weights: dict[str, Any] = {}
        self._written: list[torch.Tensor] = []
        self._is_loaded = False
        self._leaves = call_leaves(self._exported, capture.inputs.args, capture.inputs.kwargs)
        input_names = {dim_name for value in self._values if value is not None for dim_name in _symbols_of(value)}
        self.symbols = [
            symbol for symbol in program.graph.symbols if symbol.name in input_names and symbol.example is not None
        ]
        self.example: Point = {symbol.name: symbol.example for symbol in self.symbols if symbol.example is not None}

    @property
    def outcomes(self) -> Iterator[tuple[Point, Outcome]]:
        """The sizes that were tried, and what was found there."""
        return ((dict(key), outcome) for key, outcome in self._outcomes.items())

    def location(self, dimension: DeclaredDimension) -> str:
        """Return the place of a size in the arguments, such as ``images[0]: dimension 1``."""
        bound = bind_call(self._program.signature, self._capture.inputs.args, self._capture.inputs.kwargs)
        value = self._values[dimension.leaf]
        place = bound[value.name].location if value is not None and value.name in bound else "an input"
        return place if dimension.axis is None else f"{place}: dimension {dimension.axis}"

    def nearest(self, sizes: Point) -> Point:
        """Return the point with some sizes, and for the others those nearest to the example at which all guards hold."""
        choices = [
            [sizes[symbol.name]] if symbol.name in sizes else _sizes_by_distance(symbol) for symbol in self.symbols
        ]
        points = (dict(zip(self.example, chosen, strict=True)) for chosen in itertools.product(*choices))
        # None is looked for where a guard on these sizes alone does not hold.
        near_points = [] if self._refused_by(sizes) else itertools.islice(points, _MAX_POINTS)
        return next((point for point in near_points if not self._refused_by(point)), {**self.example, **sizes})

    def at(self, point: Point) -> Outcome:
        """Run the model and its program, on the data of the example cut or repeated to some sizes."""
        key = tuple(sorted(point.items()))
        if key not in self._outcomes:
            self._outcomes[key] = self._compare(point)
        return self._outcomes[key]

    def shapes_at(self, point: Point) -> Observed:
        """Run the program on tensors without data, as far as nodes need none; return the sizes that differ from the stated ones."""
        if self._leaves is None or self._refused_by(point):
            return {}
        mode, weights = self._weights_without_data()
        # torch logs what its functions for tensors without data raise.
        with suppress_log_records(FakeTensor.__module__), suppress_warnings(), mode, torch.no_grad():
            leaves = zip(self._leaves, self._values, strict=True)
            inputs = [_without_data(leaf, self._sizes(value, point)) for leaf, value in leaves if value is not None]
            run = ObservedRun(self._program, point, skips_failing=True)
            run.run(weights, inputs)
        return run.observed

    def _program_tensors(self) -> dict[str, Any]:
        return {**self._exported.state_dict, **self._exported.constants}

    def _load_weights(self) -> bool:
        """Whether the weights have data; those that are in files are read, if they are small enough."""
        if self._is_loaded:
            return True
        tensors = self._program_tensors()
        written_names = GraphAnalysis(self._program.graph).written_weight_names
        if self._capture.deferred is None:
            self._weights = tensors
            self._written = [self._program.weights.tensors[weight_name] for weight_name in written_names]
        elif sum(tensor.nbytes for tensor in tensors.values() if isinstance(tensor, torch.Tensor)) > _MAX_READ_BYTES:
            return False
        else:
            for weight_name, tensor in tensors.items():
                data = self._capture.deferred.real(tensor) if isinstance(tensor, torch.Tensor) else tensor
                # The data of files is mapped for reading only.
                self._weights[weight_name] = data.clone() if weight_name in written_names else data
            self._written = [
                self._weights[weight_name] for weight_name in written_names if weight_name in self._weights
            ]
            self._model = None if self._model is None else _ModelWithData(self._model, self._weights)
        self._is_loaded = True
        return True

    def _compare(self, point: Point) -> Outcome:
        if self._leaves is None:
            return Outcome(Verdict.UNKNOWN, "the example is not in the containers of its program")
        if guard := self._refused_by(point):
            return Outcome(Verdict.REFUSED, f"its captured program holds for {guard} alone")
        if self._unsafe_operators:
            return Outcome(Verdict.UNKNOWN, f"{self._unsafe_operators[0]} may end the process at sizes that do not fit")
        self._remaining_work -= self._work(point)
        if self._remaining_work < 0:
            return Outcome(Verdict.UNKNOWN, "the model is too large to be tried at further sizes")
        if not self._load_weights():
            return Outcome(
                Verdict.UNKNOWN, "the weights of the model are not in memory, and too large to be read for this"
            )
        outcome = Outcome(Verdict.UNKNOWN)
        # An index of the example may be out of range at other sizes: zero is in the range of all but the empty ones.
        has_integers = any(map(_is_integer_tensor, self._leaves or ()))
        for clears_integers in (False, True):
            with suppress_warnings():
                outcome = self._compare_answers(point, clears_integers=clears_integers)
            if outcome.verdict not in (Verdict.MODEL_FAILS, Verdict.BOTH_FAIL) or not has_integers:
                break
        return outcome

    def _compare_answers(self, point: Point, *, clears_integers: bool) -> Outcome:
        try:
            leaves = [
                leaf if value is None else _resized(leaf, self._sizes(value, point), clears_integers=clears_integers)
                for leaf, value in zip(self._leaves or (), self._values, strict=True)
            ]
        except (ArithmeticError, RuntimeError) as error:
            return Outcome(Verdict.UNKNOWN, f"there is no input of these sizes: {describe_error(error)}")
        results: list[Any] = []
        observed: Observed = {}
        program_error: Exception | None = None
        # The program runs first: its operators are checked before they run, the operators of the model are not.
        try:
            results, observed = self._run(leaves, point)
        except UnsafeArgumentsError as error:
            return Outcome(Verdict.BOTH_FAIL, f"the model might end the process: {describe_error(error)}")
        except Exception as error:  # noqa: BLE001 - operators raise errors of any kind
            program_error = error
        failure, answer = self._answer(leaves)
        if isinstance(program_error, RankError):
            return Outcome(Verdict.DIFFERS, str(program_error).partition("\n")[0])
        if program_error is not None and (failure or self._capture.model is None):
            return Outcome(Verdict.BOTH_FAIL, failure or f"the program fails: {describe_error(program_error)}")
        if program_error is not None:
            return Outcome(Verdict.PROGRAM_FAILS, f"its captured program fails: {describe_error(program_error)}")
        if failure:
            return Outcome(Verdict.MODEL_FAILS, failure)
        if self._capture.model is None or are_identical(answer, results):
            return Outcome(Verdict.EQUAL, observed=observed)
        if point == self.example or self.at(self.example).verdict is Verdict.EQUAL:
            return Outcome(Verdict.DIFFERS, "its captured program answers otherwise")
        # The program rounds otherwise than the model at all sizes.
        verdict = Verdict.EQUAL if _are_close(tree_leaves(answer), results) else Verdict.UNKNOWN
        return Outcome(verdict, "its captured program answers otherwise, as at the example", observed)

    def _answer(self, leaves: list[Any]) -> tuple[str, Any]:
        """Why the model fails, empty if it does not; and its answer."""
        if self._model is None:
            return "", None
        args, kwargs = call_of_leaves(self._exported, leaves)
        try:
            inputs = Inputs(args=args, kwargs=kwargs)
            return "", run_model(self._model, inputs, written=self._written)
        except CaptureError as error:
            return f"the model fails: {describe_error(error.__cause__ or error)}", None

    def _run(self, leaves: Sequence[Any], point: Point) -> tuple[list[Any], Observed]:
        """The answer of the program, and the sizes that it found other than the stated ones."""
        inputs = [leaf for leaf, value in zip(leaves, self._values, strict=True) if value is not None]
        copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in inputs]
        with preserve_tensors(self._written), torch.no_grad():
            torch.manual_seed(EXAMPLE_SEED)
            run = ObservedRun(self._program, point)
            results = run.run(self._weights, copies)
            return [result.clone() if isinstance(result, torch.Tensor) else result for result in results], run.observed

    def _refused_by(self, point: Point) -> str:
        """The first guard that does not hold; empty if all do."""
        return next((format_guard(guard) for guard in self._program.guards if not guard_holds(guard, point)), "")

    def _work(self, point: Point) -> float:
        scale = math.prod(max(size, 1) / max(self.example[symbol_name], 1) for symbol_name, size in point.items())
        return 2 * (scale * self._example_work + _WORK_OF_NODE * len(self._program.graph.nodes))

    def _sizes(self, value: Value, point: Point) -> list[int]:
        dims = [value.expr] if value.expr is not None else value.shape
        return [evaluate_dim(dim, point) for dim in dims]

    def _weights_without_data(self) -> tuple[FakeTensorMode, dict[str, torch.Tensor]]:
        if self._fake_weights is None:
            tensors = self._program_tensors()
            known_modes = (tensor.fake_mode for tensor in tensors.values() if isinstance(tensor, FakeTensor))
            mode = next(known_modes, None) or FakeTensorMode()
            weights: dict[str, torch.Tensor] = {
                weight_name: tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)
                for weight_name, tensor in tensors.items()
                if isinstance(tensor, torch.Tensor)
            }
            self._fake_weights = mode, weights
            return mode, weights
        return self._fake_weights


def _input_values(program: LinearizedProgram) -> Any:
    inputs = iter(program.graph.inputs)
    for spec in program.exported.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            yield None if isinstance(spec.arg, ConstantArgument) else next(inputs)


def _sizes_by_distance(symbol: Symbol) -> list[int]:
    """Sizes of a symbol near the example, the nearest first."""
    example = symbol.example or 0
    first, last = max(symbol.min or 0, example - _MAX_DISTANCE), example + _MAX_DISTANCE
    sizes = range(first, 1 + (last if symbol.max is None else min(last, symbol.max)))
    return sorted(sizes, key=lambda size: abs(size - example))


def _symbols_of(value: Value) -> list[str]:
    dims: list[Dim] = [value.expr] if value.expr is not None else [*value.shape]
    return [symbol_name for dim in dims for symbol_name in symbol_names(dim)]


def _resized(leaf: Any, sizes: Sequence[int], *, clears_integers: bool) -> Any:
    """An input with other sizes: the first elements of each dimension, or all of them again and again."""
    if not isinstance(leaf, torch.Tensor):
        return sizes[0] if type(leaf) is int and sizes else leaf
    tensor = leaf.detach()
    for axis, size in enumerate(sizes):
        known_size = tensor.shape[axis]
        if size != known_size and known_size:
            tensor = tensor.index_select(axis, torch.arange(size, device=tensor.device) % known_size)
    if tuple(tensor.shape) != tuple(sizes) or (clears_integers and _is_integer_tensor(tensor)):
        return tensor.new_zeros(tuple(sizes))
    return tensor.clone()


def _without_data(leaf: Any, sizes: Sequence[int]) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.empty(tuple(sizes), dtype=leaf.dtype, device=leaf.device)
    return sizes[0] if type(leaf) is int and sizes else leaf


def _is_integer_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not (
        leaf.is_floating_point() or leaf.is_complex() or leaf.dtype is torch.bool
    )


def _are_close(answer: Sequence[Any], results: Sequence[Any]) -> bool:
    try:
        torch.testing.assert_close(list(results), list(answer), equal_nan=True)
    except (AssertionError, TypeError, ValueError):
        return False
    return True
