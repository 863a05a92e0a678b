"""The sizes that a bundle admits, decided by trials at the ends of their ranges.

A range that torch began at 2, or raised, is widened to the smaller sizes that the caller allows and that the program answers as the model
does. A range that the caller declared is narrowed where the program answers otherwise. A shape that the program states wrongly for the ends
of a range gets a symbol of its own, as a size that depends on data has.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from stagepack.capture.programs import Capture
from stagepack.errors import ExportWarning, warn_caller
from stagepack.format.graph import Graph
from stagepack.format.shapes import Guard, Symbol, guard_holds, size_in_range
from stagepack.graph.implied_guards import is_implied
from stagepack.linearize.declared_sizes import DeclaredDimension, SizeRequest
from stagepack.linearize.observed_shapes import Observed, Point, with_observed_shapes
from stagepack.linearize.program import LinearizedProgram
from stagepack.linearize.size_trial import Outcome, SizeTrial, Verdict
from stagepack.linearize.symbols import TracedSymbol
from stagepack.torch_internals import is_automatic

# How many sizes below the range of torch are tried.
_MAX_LOWER_SIZES: Final = 8
# How many combinations of sizes of several symbols are tried before a size is admitted.
_MAX_COMBINATIONS = 32
# What a bundle answers with an error, so that a size is not wrong because of it.
_REFUSED = (Verdict.BOTH_FAIL, Verdict.PROGRAM_FAILS, Verdict.REFUSED)
_OTHER_THAN_MODEL = (Verdict.DIFFERS, Verdict.PROGRAM_FAILS)
# How many nodes run without data in all, about a fifth of a millisecond each.
_MAX_NODES: Final = 2_000
# The largest size that is tried without data, and that where operators are traced step by step, such as recurrent layers.
_LARGEST_SIZE, _LARGEST_STEPS = 2**31, 64
_STEPWISE: Final = ("aten.lstm", "aten.gru", "aten.rnn_", "higher_order.")
# How far below the upper end a size is looked for that satisfies all guards.
_MAX_STEPS_DOWN: Final = 64


def with_tried_sizes(capture: Capture, program: LinearizedProgram) -> LinearizedProgram:
    """Return a program with the ranges and the shapes that trials have shown to be right.

    A model with weights that are not in memory, or whose trials would be too much work, is not run.
    """
    trial = SizeTrial(capture, program)
    _warn_of_fixed_sizes(trial, program.declared.dimensions)
    requests = program.declared.requests
    requests_by_name = {
        symbol_name: requests[traced.name]
        for symbol_name, traced in program.traced_symbols.items()
        if traced.name in requests
    }
    # A model whose weights are read from files is compared with its program when these are written (`AnswerDiffersError`).
    is_verified = capture.model is not None and capture.deferred is None
    ranges = _Ranges(trial, requests_by_name, program.traced_symbols, is_verified=is_verified)
    ranges.decide()
    if capture.model is not None:
        ranges.warn(capture.model_name)
    symbols = tuple(ranges.applied(symbol) for symbol in program.graph.symbols)
    guards = tuple(guard for guard in (*program.guards, *ranges.exclusions) if not is_implied(guard, symbols))
    graph = replace(program.graph, symbols=symbols)
    graph = with_observed_shapes(graph, _observations(trial, graph, guards))
    return dataclasses.replace(program, graph=graph, guards=guards)


def _warn_of_fixed_sizes(trial: SizeTrial, declared: Iterable[DeclaredDimension]) -> None:
    for dimension in declared:
        if is_automatic(dimension.dim) and type(dimension.size) is int and dimension.size in (0, 1):
            _warn(
                f"{trial.location(dimension)}: its size in the example is {dimension.size}, and torch.export fixes a size of Dim.AUTO that "
                "is 0 or 1 in the example: use an example of 2 or more, or the bundle takes this size alone"
            )


class _Ranges:
    """The sizes of the symbols of a program, while they are decided."""

    def __init__(
        self,
        trial: SizeTrial,
        requests: Mapping[str, SizeRequest],
        traced_symbols: Mapping[str, TracedSymbol],
        *,
        is_verified: bool,
    ) -> None:
        # Conditions that leave out sizes inside of the ranges.
        self.exclusions: list[Guard] = []
        self._trial = trial
        self._requests = requests
        self._traced_symbols = traced_symbols
        self._is_verified = is_verified
        self._symbols = [symbol for symbol in trial.symbols if symbol.name in requests]
        self._smallest: dict[str, int] = {}
        self._admitted: dict[str, list[int]] = {}
        self._failures: dict[str, tuple[int, Outcome]] = {}

    def decide(self) -> None:
        """Try the sizes of each symbol, alone and with admitted sizes of other symbols."""
        for symbol in self._symbols:
            failures = self._failures_of(symbol)
            lowest = self._smallest[symbol.name]
            excluded = [
                size for size, outcome in failures.items() if size > lowest and outcome.verdict is not Verdict.REFUSED
            ]
            self.exclusions += [Guard(left=symbol.name, relation="ne", right=size) for size in excluded]
            if missing := [size for size in failures if size < lowest or size in excluded]:
                self._failures[symbol.name] = missing[0], failures[missing[0]]
        if self._is_verified:
            self._try_smallest_together()

    def _failures_of(self, symbol: Symbol) -> dict[int, Outcome]:
        """Find the smallest size of a symbol, and why others are not admitted, the largest first."""
        symbol_name, requested_min = symbol.name, self._requests[symbol.name].smallest
        known_min = self._traced_symbols[symbol_name].min or 0
        failures: dict[int, Outcome] = {}
        # torch takes 0 and 1 for sizes like any other where the caller declares them, whatever the code of the model does there.
        special_sizes = {known_min, 0, 1} if self._is_verified else set()
        sizes = sorted(
            (size for size in special_sizes if known_min <= size < self._trial.example[symbol_name]), reverse=True
        )
        for size in sizes:
            outcome = self._trial.at(self._trial.nearest({symbol_name: size}))
            if outcome.verdict in _OTHER_THAN_MODEL:
                failures[size] = outcome
        for size in range(known_min - 1, max(requested_min, known_min - _MAX_LOWER_SIZES) - 1, -1):
            sizes.append(size)
            failure = self._first_failure(symbol_name, size)
            if failure is None:
                self._admitted.setdefault(symbol_name, []).append(size)
            else:
                failures[size] = failure
        fitting = [size for size in sizes if size not in failures]
        self._smallest[symbol_name] = min(fitting, default=max(failures, default=known_min - 1) + 1)
        return failures

    def _first_failure(self, symbol_name: str, size: int) -> Outcome | None:
        """Why a size of a symbol is not admitted: alone, or with sizes of others that are; None if it is."""
        example = self._trial.example
        outcome = self._trial.at(self._trial.nearest({symbol_name: size}))
        if outcome.verdict in _REFUSED:
            # The input may need the same size of others, as `gather` does of its index, or an attention mask of its texts.
            joint_names = [joint_name for joint_name in example if joint_name in self._requests]
            joint_sizes = {joint_name: max(size, self._requests[joint_name].smallest) for joint_name in joint_names}
            outcome = self._trial.at(self._trial.nearest(joint_sizes))
        if outcome.verdict is not Verdict.EQUAL:
            return outcome
        choices = [
            [(other_name, example[other_name]), *((other_name, size_of_other) for size_of_other in sizes)]
            for other_name, sizes in self._admitted.items()
        ]
        lowest = tuple((other_name, min(sizes)) for other_name, sizes in self._admitted.items())
        combinations = itertools.islice(itertools.product(*choices), _MAX_COMBINATIONS)
        for combination in itertools.chain(combinations, [lowest]):
            outcome = self._trial.at({**example, **dict(combination), symbol_name: size})
            if outcome.verdict is not Verdict.EQUAL and outcome.verdict not in _REFUSED:
                return outcome
        return None

    def _try_smallest_together(self) -> None:
        """Leave out the smallest size of a symbol if the program answers otherwise where all have their smallest ones."""
        example = self._trial.example
        outcome = self._trial.at({**example, **self._smallest})
        if outcome.verdict not in _OTHER_THAN_MODEL:
            return
        for symbol_name, size in self._smallest.items():
            raised = {**self._smallest, symbol_name: size + 1}
            if size < example[symbol_name] and self._trial.at({**example, **raised}).verdict not in _OTHER_THAN_MODEL:
                self._smallest, self._failures[symbol_name] = raised, (size, outcome)
                return

    def warn(self, model_name: str) -> None:
        """Warn of sizes that were asked for and cannot be had, and of those that were not tried."""
        excluded = {str(guard.left): guard.right for guard in reversed(self.exclusions)}
        for symbol in map(self.applied, self._symbols):
            request = self._requests[symbol.name]
            size, outcome = self._failures.get(symbol.name, (0, None))
            is_narrower = (symbol.min or 0) > request.smallest or (
                request.largest is not None and symbol.max is not None and symbol.max < request.largest
            )
            shown = self._shown(symbol, request)
            if outcome is not None and outcome.verdict is Verdict.UNKNOWN:
                _warn(
                    f"{shown}: sizes under {symbol.min} are not tried, and not admitted: {outcome.reason}. Declare the sizes that there "
                    "are, as in torch.export.Dim('batch', min=1)"
                )
            elif request.is_explicit and (is_narrower or symbol.name in excluded):
                declared = _range_text(request.smallest, request.largest)
                admitted = _range_text(symbol.min or 0, symbol.max)
                hole = f" without {excluded[symbol.name]}" if symbol.name in excluded else ""
                reason = "" if outcome is None else f": at {size}, {outcome.reason}"
                _warn(
                    f"{model_name} does not allow all declared sizes, which are narrowed: {shown} from {declared} to {admitted}{hole}"
                    f"{reason}"
                )

    def _shown(self, symbol: Symbol, request: SizeRequest) -> str:
        """How the caller calls a size: by the name of a ``Dim``, else by its place in the arguments."""
        dimension = request.dimension
        return symbol.name if dimension is None or dimension.named_dim is not None else self._trial.location(dimension)

    def applied(self, symbol: Symbol) -> Symbol:
        """Return a symbol with the range that was decided; the range of torch if none was decided."""
        smallest = self._smallest.get(symbol.name, self._traced_symbols[symbol.name].min)
        return symbol if smallest == symbol.min else replace(symbol, min=smallest)


def _range_text(smallest: int, largest: int | None) -> str:
    return f"{smallest}..{'' if largest is None else largest}"


def _warn(message: str) -> None:
    warn_caller(ExportWarning(message))


def _observations(trial: SizeTrial, graph: Graph, guards: Sequence[Guard]) -> list[Observed]:
    """What runs at sizes that a program admits have found other than its graph states."""
    symbols = {symbol.name: symbol for symbol in graph.symbols}

    def is_admitted(point: Point) -> bool:
        in_range = all(size_in_range(symbols[symbol_name], size) for symbol_name, size in point.items())
        return in_range and all(guard_holds(guard, point) for guard in guards)

    tried = [
        (point, outcome.observed)
        for point, outcome in trial.outcomes
        if outcome.verdict is Verdict.EQUAL and is_admitted(point)
    ]
    known_points = [point for point, _ in tried]
    ranges = [symbols[symbol.name] for symbol in trial.symbols]
    is_stepwise = any(op.name.startswith(_STEPWISE) for op in graph.ops)
    ends = _ends(trial.example, ranges, guards, is_stepwise=is_stepwise)
    points = [point for point in ends if is_admitted(point) and point not in known_points]
    affordable_points = points[: max(1, _MAX_NODES // max(len(graph.nodes), 1))]
    return [*(observed for _, observed in tried), *map(trial.shapes_at, affordable_points)]


def _ends(example: Point, symbols: Sequence[Symbol], guards: Sequence[Guard], *, is_stepwise: bool) -> Iterator[Point]:
    """The ends of the ranges: all upper ones, all lower ones, then each alone."""
    if not symbols:
        return
    limit = _LARGEST_STEPS if is_stepwise else _LARGEST_SIZE
    lower = {symbol.name: symbol.min or 0 for symbol in symbols}
    upper = {symbol.name: _largest(symbol, example, guards, limit) for symbol in symbols}
    yield upper
    yield lower
    if len(symbols) > 1:
        for ends in (lower, upper):
            yield from ({**example, symbol_name: size} for symbol_name, size in ends.items())


def _largest(symbol: Symbol, example: Point, guards: Sequence[Guard], limit: int) -> int:
    """The largest size of a symbol, alone, for which all guards hold; that of the example if none is near the end."""
    known_size = example[symbol.name]
    # Without an upper end, a prime number that no code is likely to name.
    end = max(min(symbol.max if symbol.max is not None else 1_009, limit), known_size)
    sizes = range(end, max(end - _MAX_STEPS_DOWN, known_size), -1)
    fits = (size for size in sizes if all(guard_holds(guard, {**example, symbol.name: size}) for guard in guards))
    return next(fits, known_size)
