"""Check what an export writes as loaders do: the graph before the cut, and the bundle before it has its name, which runs its example."""

import contextlib
import copy
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stagepack import errors
from stagepack.capture.asked_properties import OtherInputs, Property, other_inputs
from stagepack.capture.checkpoint import map_tensor
from stagepack.capture.model_runs import EXAMPLE_SEED, are_identical, run_model_twice
from stagepack.capture.program_run import diverging_module
from stagepack.capture.programs import Capture
from stagepack.capture.torch_messages import suppress_warnings
from stagepack.format.dtypes import TORCH_DTYPES
from stagepack.format.graph import Node
from stagepack.format.operators import needed_permissions
from stagepack.format.reader import Bundle, bundle_permissions
from stagepack.format.rules import format_names
from stagepack.format.weights import StoredTensor
from stagepack.linearize import LinearizedProgram
from stagepack.linearize.captured_example import recorded_inputs, run_example
from stagepack.linearize.op_tables import with_node_location
from stagepack.unwritten_memory import ALLOCATING_OPERATORS
from stagepack_loaders.base import Loading
from stagepack_loaders.comparison import Difference, format_difference
from stagepack_loaders.example import compare_results, run_on_inputs
from stagepack_loaders.local_pipeline import Pipeline
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.preparation import finish_prepared, prepare
from stagepack_loaders.registry import TORCH_RUNTIME
from stagepack_loaders.torch.resolved_operators import resolve_operators
from stagepack_loaders.torch.value_check import value_problems
from stagepack_loaders.torch.weight_store import WeightCache

_SHOWN_PROBLEMS = 5
# The fused kernel of a frozen encoder in evaluation mode writes zeros at padded rows.
_FAST_PATH_CLASS = "TransformerEncoder"
_FAST_PATH_SWITCH = (
    "call torch.backends.mha.set_fastpath_enabled(False) before the export, so that both take the same path"
)
_IN_PLACE = "changes the shape or the strides of"


def check_program(program: LinearizedProgram) -> None:
    """Refuse a program that no loader accepts once it is written."""
    graph = program.graph
    with refused_by_loaders():
        operators = resolve_operators(graph.ops, needed_permissions([graph]), "the graph")
        problems = value_problems(graph, operators)
    if problems:
        position_of_node = {id(node): position for position, node in enumerate(graph.nodes)}
        shown = [
            _described(program, node, message, position_of_node.get(id(node)))
            for node, message in problems[:_SHOWN_PROBLEMS]
        ]
        raise errors.UnsupportedError("; ".join(shown) + _changed_defaults())


def _described(program: LinearizedProgram, node: Node, message: str, position: int | None) -> str:
    graph = program.graph
    sentence = f"{graph.ops[node.op].name}: {message}, so no loader would accept the bundle: {_advice(message)}"
    source = None if position is None else program.sources[position]
    if source is not None:
        return with_node_location(sentence, source)
    path = graph.scopes[node.scope].path if graph.scopes else ""
    return f"{sentence} ({path})" if path else sentence


def _advice(message: str) -> str:
    if _IN_PLACE in message or "another node has changed" in message:
        return (
            "write the model without the operator in place, such as x.t() for x.t_(), or x = x + y for torch.add(x, y, out=x); or export "
            "program.run_decompositions() of a captured program"
        )
    return "write the model with another operator, or export program.run_decompositions() of a captured program"


@contextlib.contextmanager
def _defaults_of_torch() -> Iterator[None]:
    """The default dtype and the autocast of a process that has set neither."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_default_dtype(default_dtype)


def _changed_defaults() -> str:
    """What of torch this process has set otherwise, for messages."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "; torch.autocast is on around the export, and is not when the bundle is loaded: call it in the model's forward"
    if (dtype := torch.get_default_dtype()) is not torch.float32:
        return f"; the default dtype is {dtype} here, and torch.float32 where the bundle is loaded: export with it, or pass dtype= there"
    return ""


@contextlib.contextmanager
def refused_by_loaders() -> Iterator[None]:
    """Return a context with the defaults of torch, as loaders have them, that raises what they refuse as the error of an export."""
    try:
        with _defaults_of_torch():
            yield
    except errors.InputError as error:
        raise errors.CaptureError(f"the example does not fit the captured program: {error}") from error
    except (errors.FormatError, errors.OperatorError, errors.StageFailedError) as error:
        message = f"the bundle would be refused when it is loaded or called: {error}{_changed_defaults()}"
        raise errors.UnsupportedError(message) from error


class _MappedForReading(WeightCache):
    """Weights mapped for reading only: the system may refuse a mapping that can be written and is larger than the memory."""

    def open_files(self, bundle: Bundle, file_names: Iterable[str], loading: Loading, *, verify: bool) -> None:
        """Open nothing: `_read_stored` maps each tensor."""

    def _read_stored(self, path: Path, stored: StoredTensor, device: torch.device, *, copy: bool) -> torch.Tensor:
        key = (stored.name, device)
        if key not in self._stored:
            dtype: torch.dtype = getattr(torch, TORCH_DTYPES[stored.dtype])
            self._stored[key] = map_tensor(path, stored.start, dtype, stored.shape).to(device, copy=copy)
        return self._stored[key]


class LoadedDraft:
    """The stages of a bundle before it has its name, prepared as for a caller who allows their operators."""

    def __init__(self, draft: Bundle, device: str) -> None:
        self._draft = draft
        with refused_by_loaders():
            try:
                self._pipeline = self._load(device)
            except errors.DeviceError:
                self._pipeline = self._load("cpu")

    def _load(self, device: str) -> Pipeline:
        options = LoadOptions(devices=[device], runtime=TORCH_RUNTIME, allow_ops=bundle_permissions(self._draft))
        loading = Loading(options=options)
        loading.shared.get(WeightCache, _MappedForReading)
        prepared_stages = prepare(self._draft, loading)
        return Pipeline(self._draft, list(finish_prepared(self._draft, prepared_stages, verify=False).values()))

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the leaves of the answer as tensors on the CPU, as ``output.INDEX``."""
        with refused_by_loaders(), torch.random.fork_rng(range(torch.cuda.device_count())):
            try:
                answer = self._run(inputs)
            except errors.StageFailedError as error:
                if not isinstance(error.__cause__, torch.OutOfMemoryError):
                    raise
                self._pipeline = self._load("cpu")
                answer = self._run(inputs)
        return {result_name: tensor.detach().cpu() for result_name, tensor in answer.items()}

    def _run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self._pipeline.reset_state()
        self._pipeline.seed(EXAMPLE_SEED)
        return run_on_inputs(self._pipeline, copy.deepcopy(dict(inputs)))

    def difference(self, answer: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Difference:
        """Compare two answers; both are as `run` returns them."""
        return compare_results(self._pipeline, answer, expected)


def report_difference(capture: Capture, inputs: Sequence[Any], largest: float, *, is_allowed: bool) -> None:
    """Say that the captured program answers otherwise than the model, and in which module the two part."""
    module = ""
    if capture.model is not None:
        module = diverging_module(capture.model, capture.program, capture.inputs, inputs)
    part = f", first in {module}" if module else ""
    targets = {str(node.target) for node in capture.program.graph.nodes}
    cause = "the model takes another path in eager mode than under torch.export"
    if allocating := sorted(targets & ALLOCATING_OPERATORS):
        cause = f"the model may return memory that {allocating[0]} has not written, where bundles have zeros (torch.zeros does); or {cause}"
    _refuse_difference(
        f"{capture.model_name}: the captured program answers the example otherwise than the model does, by {format_difference(largest)}"
        f"{part}: {cause}{_changed_defaults()}",
        change=_FAST_PATH_SWITCH if _FAST_PATH_CLASS in module else "change the model so that both take the same path",
        consequence="; the bundle has the answer of the captured program",
        is_allowed=is_allowed,
    )


def check_second_call(capture: Capture, changed: Sequence[str], *, is_allowed: bool) -> None:
    """Compare two calls of a model that changes attributes of its own, which a bundle does not."""
    if capture.model is None or are_identical(*run_model_twice(capture.model, capture.inputs)):
        return
    _refuse_difference(
        f"{capture.model_name}: a second call answers the example otherwise than the first: a call changes {format_names(changed)}, and "
        "a bundle answers every call as the first",
        change="make it a buffer that the call writes in place (register_buffer)",
        is_allowed=is_allowed,
    )


def check_other_inputs(
    stages: LoadedDraft,
    capture: Capture,
    program: LinearizedProgram,
    *,
    written: Collection[torch.Tensor],
    is_allowed: bool,
) -> None:
    """Compare the stages with the model on its example with other properties, where its code asks for these."""
    if capture.model is None:
        return
    for asked, other in other_inputs(capture.inputs, capture.questions):
        changed = dataclasses.replace(capture, inputs=other.of(capture.inputs))
        try:
            with suppress_warnings():
                caller = dataclasses.replace(capture, model=other.caller(capture.model))
                model_answer = run_example(caller, program, written)
                answer = stages.run(recorded_inputs(changed, program))
        except (errors.CaptureError, errors.UnsupportedError):
            continue  # what the model or the stages refuse is no wrong answer
        difference = stages.difference(answer, model_answer)
        if not difference.within:
            _report_question(capture, asked, other, difference.largest, is_allowed=is_allowed)
            return


def _report_question(
    capture: Capture, asked: Property, other: OtherInputs, largest: float, *, is_allowed: bool
) -> None:
    question = capture.questions[asked]
    shown_location = f" ({question.location})" if question.location else ""
    which = "inputs" if other.position is None else f"the tensor number {other.position + 1} of the inputs"
    _refuse_difference(
        f"{capture.model_name} asks for the {asked} of its inputs, by {question.function}{shown_location}, which torch.export answers for "
        f"the example alone: with {which} {other.description}, the model answers otherwise than the captured program, by "
        f"{format_difference(largest)}",
        change="change the model so that its answer does not depend on it",
        consequence="; the bundle answers as the captured program does",
        is_allowed=is_allowed,
    )


def _refuse_difference(message: str, *, change: str, consequence: str = "", is_allowed: bool) -> None:
    """Raise an error that says what to change; or, if the caller allows the difference, warn of it and its consequence."""
    if not is_allowed:
        raise errors.AnswerDiffersError(
            f"{message}: {change}, or export it all the same with --allow-difference (in Python allow_difference=True)"
        )
    errors.warn_caller(errors.ExportWarning(f"{message}{consequence}"))
