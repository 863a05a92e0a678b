"""Compare the answers of stages in ONNX Runtime with those in torch, on the example and on inputs of other sizes made of it."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from stagepack.capture.torch_messages import suppress_warnings
from stagepack.errors import InputError, OperatorError, StagepackError
from stagepack.format.graph import Value
from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack.format.shapes import example_sizes
from stagepack.roads.onnx.draws import DRAWS, RANDOM_OPERATORS, Draw, call_count, compare_draws
from stagepack.roads.onnx.functional_stage import float64_answers, rounding_error
from stagepack.roads.onnx.other_sizes import Sizes, call_bytes, format_sizes, inputs_at, sizes_to_check
from stagepack.torch_internals import TorchDispatchMode
from stagepack_loaders.base import Loading
from stagepack_loaders.comparison import TOLERANCE, Tolerance, compare_arrays
from stagepack_loaders.example import read_example_inputs
from stagepack_loaders.exchange import to_array, to_runtime
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.preparation import prepare
from stagepack_loaders.registry import find_runtime
from stagepack_loaders.stage_errors import typed_stage_errors
from stagepack_loaders.torch.arrays import TORCH_ARRAYS

_MAX_REASON_LENGTH = 300
# The answer of ONNX Runtime may differ from the answer of torch by this multiple of the rounding error of torch.
_ROUNDING_ERRORS = 8


@dataclass(frozen=True, slots=True)
class StageCheck:
    """How far the answers of a stage in ONNX Runtime are from those in torch.

    Attributes:
        difference: the largest absolute difference, at all sizes; None if the answers were not compared, or are random.
        rounding: the largest difference of the answer in torch from that in float64, of the outputs for which it decided; None if
            it was not needed.
        within: whether all differences are allowed.
        reason: why the answers were not compared, or which difference is not allowed; "draws random numbers" if distributions were
            compared.
        sizes: the sizes at which the answers were compared, besides the sizes of the example.
        unchecked: the sizes at which they were not, because no inputs could be made of the example with which the model runs in torch.
    """

    difference: float | None = None
    rounding: float | None = None
    within: bool = True
    reason: str = ""
    sizes: tuple[Mapping[str, int], ...] = ()
    unchecked: tuple[Mapping[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Answer:
    """A tensor that a stage returns or writes."""

    title: str
    value: torch.Tensor
    # The edge of an output; None of what is written.
    edge_name: str | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the model in torch, stage by stage."""

    # The sizes of the symbols; None for the sizes of the example.
    sizes: Sizes | None
    values: dict[str, Any]


def check_stages(
    bundle: Bundle, allow_ops: Collection[str], tolerance: Tolerance | None = None
) -> Iterator[StageCheck]:
    """Run each stage in torch, and in ONNX Runtime too if it has an ONNX model, on the example and at other sizes.

    A difference is allowed within the tolerance of `stagepack_loaders.comparison`. A larger difference of an output is allowed if it is at
    most 8 times the difference of torch's own answer from the stage in float64, and at most the relative tolerance of the largest value.
    Of a stage that draws random numbers, the distributions of the answers are compared.
    """
    if bundle.example is None:
        yield from [StageCheck(reason="the bundle has no example")] * len(bundle.stages)
        return
    example_inputs = read_example_inputs(bundle, TORCH_ARRAYS)
    calls = [_Call(None, dict(example_inputs))]
    other_sizes = sizes_to_check(bundle)
    calls += [_Call(sizes, inputs) for sizes in other_sizes for inputs in inputs_at(bundle, example_inputs, sizes)]
    for stage_number in range(len(bundle.stages)):
        stage = _CheckedStage(bundle, stage_number, allow_ops, tolerance)
        for call in list(calls):
            try:
                with suppress_warnings():
                    stage.run(call)
            except StagepackError:
                if call.sizes is None:
                    raise
                calls.remove(call)
        unused = {edge.name for edge in bundle.edges if max(edge.consumers, default=-1) <= stage_number}
        for call in calls:
            for edge_name in unused.intersection(call.values):
                del call.values[edge_name]
        reached = [call.sizes for call in calls]
        yield replace(stage.check, unchecked=tuple(sizes for sizes in other_sizes if sizes not in reached))


class _Writes(TorchDispatchMode):
    """Finds calls of ``index_put_`` that write different values to one place: which one stays is not defined."""

    supports_higher_order_operators = True
    are_in_conflict = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the base class."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.index_put_.default and not (len(args) > 3 and args[3]):
            written = args[0][tuple(slice(None) if index is None else index for index in args[1])]
            self.are_in_conflict |= not torch.equal(written, args[2].expand_as(written))
        return result


@dataclass(slots=True)
class _CheckedStage:
    """A stage that is checked, call after call."""

    bundle: Bundle
    stage_number: int
    allow_ops: Collection[str]
    tolerance: Tolerance | None
    torch_stage: Any = field(init=False)
    # The stage in ONNX Runtime; None if there is nothing to check, or no more.
    onnx_stage: Any = field(init=False, default=None)
    check: StageCheck = field(init=False, default_factory=StageCheck)
    _writes_conflict: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.torch_stage = self._load(LoadOptions(runtime="torch", allow_ops=self.allow_ops))
        if self.bundle.stages[self.stage_number].onnx is None:
            return
        try:
            self.onnx_stage = self._load(LoadOptions(runtime="onnxruntime"))
        except OperatorError as error:
            self.check = StageCheck(within=False, reason=str(error))

    def _load(self, options: LoadOptions) -> Any:
        prepared = prepare(self.bundle, Loading(options=options), [self.stage_number])
        return prepared[self.stage_number].finish(verify=False)

    def run(self, call: _Call) -> None:
        """Run a call in torch, whose outputs become values of the call, and compare the answers."""
        entry = self.bundle.stages[self.stage_number]
        inputs = [call.values[edge_name] for edge_name in entry.inputs]
        # The stage may write into its inputs.
        original_inputs = _copies(inputs)
        outputs, torch_answers = self._run_torch(inputs)
        if self._writes_conflict and call.sizes is not None:
            raise InputError("the call writes several values to one place, of which any may stay")
        call.values.update(zip(entry.outputs, outputs, strict=True))
        if self.onnx_stage is None:
            return
        try:
            check = self._compare(call, original_inputs, torch_answers)
        except Exception as error:  # noqa: BLE001 - the exceptions of onnxruntime have no common base
            message = " ".join(str(error).split())[:_MAX_REASON_LENGTH]
            check = StageCheck(within=False, reason=f"it fails in ONNX Runtime: {message}")
        self._add(check, call.sizes)

    def _add(self, check: StageCheck, sizes: Sizes | None) -> None:
        """Add the result of a call to the result of the stage. After a difference that is not allowed, no further call is compared."""
        if not check.within:
            self.onnx_stage = None
            prefix = "" if not sizes else f"at {format_sizes(sizes)} "
            self.check = replace(check, reason=f"{prefix}{check.reason}", sizes=self.check.sizes)
            return
        differences, roundings = (
            [value for value in pair if value is not None]
            for pair in ((self.check.difference, check.difference), (self.check.rounding, check.rounding))
        )
        self.check = StageCheck(
            max(differences, default=None),
            max(roundings, default=None),
            reason=self.check.reason or check.reason,
            sizes=(*self.check.sizes, *([sizes] if sizes and sizes not in self.check.sizes else [])),
        )

    def _compare(self, call: _Call, inputs: list[Any], torch_answers: list[_Answer]) -> StageCheck:
        """Compare the answers to a call."""
        onnx_answers = self._run_onnx(inputs)
        if self._is_random(inputs, torch_answers):
            return self._compare_distributions(call, inputs, torch_answers, onnx_answers)
        compute_exactly = partial(float64_answers, self.bundle, self.stage_number, inputs, self.allow_ops)
        return _compare_answers(onnx_answers, torch_answers, self.tolerance, compute_exactly)

    def _is_random(self, inputs: list[Any], torch_answers: list[_Answer]) -> bool:
        """Whether the answers to a call are random: of an operator that may draw, such as dropout, not every call does."""
        onnx_operators = {
            operator_name for _, operator_name in self.bundle.onnx_file(self.stage_number).model.operators
        }
        if not onnx_operators.isdisjoint(RANDOM_OPERATORS):
            return True
        if not any(op.random for op in self.torch_stage.graph.ops):
            return False
        _, repeated_answers = self._run_torch(_copies(inputs), seed=1)
        return any(
            not compare_arrays(TORCH_ARRAYS, repeated.value, answer.value, Tolerance(0.0, 0.0)).within
            for repeated, answer in zip(repeated_answers, torch_answers, strict=True)
        )

    def _compare_distributions(
        self, call: _Call, inputs: list[Any], torch_answers: list[_Answer], onnx_answers: list[_Answer]
    ) -> StageCheck:
        """Compare the answers to a call that is repeated."""
        sizes = example_sizes(self.bundle.entry_point.symbols) | (call.sizes or {})
        largest_answer = max((answer.value.numel() for answer in torch_answers), default=0)
        count = call_count(largest_answer, call_bytes([self.torch_stage.graph], sizes))
        # A large answer is not kept: of each call, the elements that are compared are.
        onnx_calls = [self._draws(onnx_answers)]
        onnx_calls += [self._draws(self._run_onnx(_copies(inputs))) for _ in range(1, count)]
        torch_calls = [self._draws(self._run_torch(_copies(inputs), seed=seed)[1]) for seed in range(count)]
        for position, answer in enumerate(torch_answers):
            onnx_draws, torch_draws = ([draws[position] for draws in calls] for calls in (onnx_calls, torch_calls))
            if reason := compare_draws(onnx_draws, torch_draws, self.tolerance):
                return StageCheck(within=False, reason=f"it draws other random numbers in the {answer.title}: {reason}")
        return StageCheck(reason=DRAWS)

    def _draws(self, answers: list[_Answer]) -> list[Draw]:
        return [Draw.of(answer.value) for answer in answers]

    def _run_torch(self, inputs: list[Any], seed: int = 0) -> tuple[tuple[Any, ...], list[_Answer]]:
        """Run the stage in torch, which may write into its inputs; return the outputs, and all answers."""
        self.torch_stage.reset_state()
        writes = _Writes()  # type: ignore[no-untyped-call]
        with torch.no_grad(), torch.random.fork_rng(devices=[]), typed_stage_errors(self.stage_number), writes:
            torch.manual_seed(seed)
            outputs = self.torch_stage.run(inputs)
        self._writes_conflict = writes.are_in_conflict
        tensors = dict(self.torch_stage.named_parameters(remove_duplicate=False))
        tensors |= self.torch_stage.named_buffers(remove_duplicate=False)
        state = {
            weight_name: tensors[weight_name].detach() for weight_name in self.bundle.stages[self.stage_number].state
        }
        return outputs, self._answers(outputs, inputs, state)

    def _run_onnx(self, inputs: list[Any]) -> list[_Answer]:
        """Run the stage in ONNX Runtime, which may write into its inputs; return all answers."""
        self.onnx_stage.reset_state()
        edges = {edge.name: edge for edge in self.bundle.edges}
        runtime = find_runtime(self.onnx_stage.runtime)
        entry = self.bundle.stages[self.stage_number]
        arguments = [
            to_runtime(value, edges[edge_name], runtime) for edge_name, value in zip(entry.inputs, inputs, strict=True)
        ]
        outputs = self.onnx_stage.run(arguments)
        return self._answers(outputs, arguments, self.onnx_stage.state)

    def _answers(self, outputs: Sequence[Any], inputs: Sequence[Any], state: Mapping[str, Any]) -> list[_Answer]:
        """What a call of either runtime returned and wrote, as tensors."""
        entry = self.bundle.stages[self.stage_number]
        edges = {edge.name: edge for edge in self.bundle.edges}
        weights = {weight.names[0]: weight for weight in self.torch_stage.graph.weights}
        answers = [
            _Answer(f"output {edge_name}", _tensor(value, edges[edge_name]), edge_name)
            for edge_name, value in zip(entry.outputs, outputs, strict=True)
        ]
        answers += [
            _Answer(f"input {edge_name} after the call", _tensor(value, edges[edge_name]))
            for edge_name, value in zip(entry.inputs, inputs, strict=True)
        ]
        for weight_name in entry.state:
            stated = Value(name=weight_name, dtype=weights[weight_name].dtype, shape=weights[weight_name].shape)
            answers.append(_Answer(f"buffer {weight_name} after the call", _tensor(state[weight_name], stated)))
        # A later call may write into this memory.
        return [replace(answer, value=answer.value.clone()) for answer in answers]


def _tensor(value: Any, stated: Value | Edge) -> torch.Tensor:
    tensor: torch.Tensor = TORCH_ARRAYS.array(to_array(value, stated, TORCH_ARRAYS))
    return tensor


def _copies(inputs: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]


def _compare_answers(
    onnx_answers: Sequence[_Answer],
    torch_answers: Sequence[_Answer],
    tolerance: Tolerance | None,
    compute_exactly: Callable[[], Mapping[str, torch.Tensor]],
) -> StageCheck:
    """Compare the answers of a stage. `compute_exactly` computes those in float64; it is called if some are beyond the tolerance."""
    pairs = list(zip(onnx_answers, torch_answers, strict=True))
    differences = [
        compare_arrays(TORCH_ARRAYS, onnx_answer.value, torch_answer.value, tolerance)
        for onnx_answer, torch_answer in pairs
    ]
    largest = max((difference.largest for difference in differences), default=0.0)
    beyond = [
        (onnx_answer.value, torch_answer, difference.largest)
        for (onnx_answer, torch_answer), difference in zip(pairs, differences, strict=True)
        if not difference.within
    ]
    exact_answers = compute_exactly() if beyond and tolerance is None else {}
    largest_rounding: float | None = None
    for onnx_value, answer, difference in beyond:
        rounding = None if answer.edge_name is None else rounding_error(exact_answers, answer.edge_name, answer.value)
        if rounding is None or difference > min(_ROUNDING_ERRORS * rounding, _share_of_largest(answer.value)):
            reason = _refusal(onnx_value, answer, difference, rounding, tolerance)
            return StageCheck(largest, rounding, within=False, reason=reason)
        largest_rounding = max(rounding, largest_rounding or 0.0)
    return StageCheck(largest, largest_rounding)


def _share_of_largest(value: torch.Tensor) -> float:
    """The relative tolerance of the largest finite value of a tensor."""
    rtol, _ = Tolerance().of_dtype(str(value.dtype).removeprefix("torch."))
    finite_values = value[value.isfinite()].abs()
    return rtol * float(finite_values.max()) if finite_values.numel() else 0.0


def _refusal(
    onnx_value: torch.Tensor, answer: _Answer, difference: float, rounding: float | None, tolerance: Tolerance | None
) -> str:
    """Which difference is not allowed, and what would be."""
    dtype = str(answer.value.dtype).removeprefix("torch.")
    message = f"its answer differs by {difference:g} in the {answer.title}"
    if onnx_value.shape != answer.value.shape or onnx_value.dtype != answer.value.dtype:
        actual, expected = (
            f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" for value in (onnx_value, answer.value)
        )
        return f"its answer is {actual} in the {answer.title}, and {expected} in torch"
    if dtype not in TOLERANCE:
        return f"{message}, which must be equal: it is {dtype}"
    rtol, atol = (tolerance or Tolerance()).of_dtype(dtype)
    message = f"{message}, beyond rtol {rtol:g} and atol {atol:g}"
    if tolerance is not None or answer.edge_name is None:
        return message
    if rounding is None:
        return f"{message}; the stage cannot be computed in float64, which would show what {dtype} can give"
    largest = _share_of_largest(answer.value)
    return (
        f"{message}; torch itself differs by {rounding:g} from float64, of which {_ROUNDING_ERRORS} times is allowed, and at most "
        f"{largest:g}, rtol of the largest value"
    )
