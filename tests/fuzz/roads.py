"""Every road to the answer of a bundle, compared to the bit: a bundle that one of them accepts says to all of them the same."""

import contextlib
import functools
import multiprocessing
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import stagepack
from stagepack.errors import FormatError, OptionError, StageFailedError, StagepackError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack.format.shapes import evaluate_dim
from stagepack.format.tree import leaves_of_tree
from stagepack.roads.compare import compare_bundles
from stagepack.roads.recut import whole_graph
from stagepack_loaders.comparison import compare_arrays
from stagepack_loaders.distributed import stage_process
from stagepack_loaders.distributed.process_launcher import LocalLauncher
from stagepack_loaders.distributed.stage_process import ProcessDescription
from stagepack_loaders.example import read_example_inputs, run_on_inputs
from stagepack_loaders.torch.arrays import TORCH_ARRAYS
from tests.fuzz.plain_run import PlainModel
from tools.fork_server import ForkedProcess

# Operators whose result has the content that the memory had before.
_WITHOUT_CONTENT = ("aten.empty", "aten.new_empty", "aten.resize")
_LOAD_OPTIONS: tuple[dict[str, Any], ...] = (
    {"stream": True}, {"device_memory": "16KiB"}, {"copy": True}, {"verify": "manifest"}, {"verify": "off"},
)  # fmt: skip
# One bundle of so many runs in stage processes too.
_PROCESSES_OF = 20
Answers = list[Any]


class RoadsDifferError(Exception):
    """Two roads give different answers, or one refuses what another one wrote."""


def compare_roads(path: Path, original: Path, inputs: Mapping[str, dict[str, Any]], scratch: Path) -> str:
    """Compare all roads to each entry point of a bundle that was made of another; return the names of the roads, with commas."""
    bundle = stagepack.open(path)
    first = _opened(original)
    choose = random.Random(bundle.digest)  # noqa: S311 - repeatable
    roads, calls_and_answers = [], []
    for entry_point in bundle.entry_points:
        selected = bundle.select(entry_point.name)
        given = inputs.get(entry_point.name)
        values = read_example_inputs(selected, TORCH_ARRAYS) if given is None else given
        calls = _Calls(selected, values, choose)
        with torch.no_grad():
            answers, names = _compare_entry_point(calls, first, scratch / entry_point.name[:50], choose)
        roads += names
        calls_and_answers.append((calls, answers))
    if len(calls_and_answers) > 1:
        for calls, answers in calls_and_answers:
            pipeline = stagepack.load_entry_points(bundle)[calls.bundle.entry_point.name]
            _compare("entry points", answers, calls.pipeline(pipeline), has_checks=True, is_exact=True)
        roads.append("entry points")
    if bundle.digest != first.digest and _is_equal(bundle, first):
        raise RoadsDifferError("diff says that bundles of two digests are equal")
    return ", ".join(dict.fromkeys(roads))


@functools.lru_cache(maxsize=1)
def _opened(original: Path) -> Bundle:
    return stagepack.open(original)


def _is_equal(first: Bundle, second: Bundle) -> bool:
    try:
        return not compare_bundles(first, second)
    except StagepackError:
        return False


def _compare_entry_point(
    calls: "_Calls", original: Bundle, scratch: Path, choose: random.Random
) -> tuple[list[Answers | str], list[str]]:
    bundle = calls.bundle
    pipeline = stagepack.load(bundle)  # refused or not
    ops = [op for number in range(len(bundle.stages)) for op in bundle.graph(number).ops]
    if any(op.name.startswith(_WITHOUT_CONTENT) for op in ops):
        return [], ["no content"]
    answers = calls.pipeline(pipeline)
    pipeline.reset_state()
    stage_options, load_options = {"modules": choose.random() < 0.5}, choose.choice(_LOAD_OPTIONS)
    stages = choose.choice([1, 2])
    # Whether the road also refuses what one process refuses: it has the checks of a call.
    roads: dict[str, tuple[bool, Callable[[], list[Answers | str]]]] = {
        "one process": (True, lambda: calls.pipeline(pipeline)),
        " ".join(map(str, ["load", *load_options])): (
            True, lambda: calls.pipeline(stagepack.load(bundle, **load_options)),
        ),
        f"stages apart{' with modules' * stage_options['modules']}": (False, lambda: calls.stages_apart(stage_options)),
        "node by node": (False, calls.plain),
        "sequences": (False, lambda: calls.sequences(pipeline)),
        f"recut --stages {stages}": (True, lambda: calls.recut(scratch, choose, stages=stages)),
    }  # fmt: skip
    is_random = any(op.random for op in ops)
    if choose.randrange(_PROCESSES_OF) == 0 and not is_random:
        roads["processes"] = (True, calls.processes)
    if any(stage.onnx for stage in bundle.stages) and not is_random:
        # Nobody can say whether changed graphs or ONNX files compute the same.
        kept, changed = (_content(one) for one in (original, bundle))
        roads["onnxruntime" if kept == changed else "onnxruntime alone"] = (True, calls.onnx)
    compared = []
    for road, (has_checks, run) in roads.items():
        try:
            found = run()
        except OptionError:  # not enough memory
            compared.append(f"{road} refused")
            continue
        except StagepackError as error:
            # What a recut refuses is not written. Of module calls, which only a join reads, stages may say different things.
            # They need not state positions, without which there is no join.
            # Processes run the example when they start.
            is_example = road == "processes" and not _has_example(bundle)
            # ONNX models, which torch does not read, must fit what is stated.
            is_onnx = isinstance(error, FormatError) and all(problem.rule[0] == "O" for problem in error.problems)
            is_join = "the call of" in str(error) or "does not record" in str(error)
            if road.startswith("recut") or (is_onnx and road.startswith("onnxruntime")) or is_example or is_join:
                compared.append(f"{road} refused")
                continue
            found = [f"{type(error).__name__}: {error}"]
        if road != "onnxruntime alone":
            _compare(road, answers, found, has_checks=has_checks, is_exact=road != "onnxruntime")
        compared.append(road)
    return answers, [*compared, *("call refused" for answer in answers if isinstance(answer, str))]


def _has_example(bundle: Bundle) -> bool:
    try:
        return bool(read_example_inputs(bundle, TORCH_ARRAYS))
    except StagepackError:
        return False


def _content(bundle: Bundle) -> list[Any]:
    return [file for file in bundle.manifest.files if file.name != bundle.entry_point.example]


def _compare(
    road: str, answers: list[Answers | str], found: list[Answers | str], *, has_checks: bool, is_exact: bool
) -> None:
    for number, answer in enumerate(answers):
        other = found[number] if number < len(found) else found[-1]
        if isinstance(answer, str):
            if has_checks and not isinstance(other, str):
                raise RoadsDifferError(f"{road}: answers what one process refuses: {answer}")
            return
        if isinstance(other, str):
            raise RoadsDifferError(f"{road}: refused where one process answers: {other}")
        if not _are_same(answer, other, is_exact=is_exact):
            raise RoadsDifferError(f"{road}: other answers than one process: call {number}")


class _Calls:
    """Three calls in a row by each road, the last one with other sizes. The random generators are seeded before each call."""

    def __init__(self, bundle: Bundle, inputs: dict[str, Any], choose: random.Random) -> None:
        self.bundle = bundle
        self.inputs = inputs
        self.calls = [inputs, inputs, _with_other_sizes(bundle, inputs, choose)]
        self.results = [
            leaf.name for leaf in leaves_of_tree(bundle.entry_point.signature.result) if hasattr(leaf, "name")
        ]

    def _repeat(
        self, run: Callable[[dict[str, Any]], list[Any]], seed: Callable[[int], Any] = torch.manual_seed
    ) -> list[Answers | str]:
        """The answers of calls up to the first one that is refused, each with what it left in its inputs."""
        answers: list[Answers | str] = []
        for call_inputs in self.calls:
            inputs = {name: value.clone() for name, value in call_inputs.items()}
            seed(7)
            try:
                results = run(inputs)
            except StagepackError as error:
                return [*answers, f"{type(error).__name__}: {error}"]
            answers.append([torch.as_tensor(value).clone() for value in (*results, *inputs.values())])
        return answers

    def _values(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Inputs as stages take them: symbolic scalars are numbers."""
        scalars = {edge.name for edge in self.bundle.entry_point.inputs if edge.dtype in SCALAR_DTYPES}
        return {name: value.item() if name in scalars else value for name, value in inputs.items()}

    def pipeline(self, pipeline: Any) -> list[Answers | str]:
        return self._repeat(lambda inputs: list(run_on_inputs(pipeline, inputs).values()), pipeline.seed)

    def stages_apart(self, options: dict[str, Any]) -> list[Answers | str]:
        """Each stage loaded by itself, with values that share no memory, as in processes."""
        stages = [stagepack.load_stage(self.bundle, number, **options) for number in range(len(self.bundle.stages))]

        def run(inputs: dict[str, Any]) -> list[Any]:
            values = self._values(inputs)
            bound = {name: BoundArgument(name, value) for name, value in values.items()}
            sizes = dict(check_values(self.bundle.entry_point.inputs, bound, self.bundle.entry_point.symbols))
            for stage, entry in zip(stages, self.bundle.stages, strict=True):
                # An input of the model is the caller's, and what is written to it comes back.
                taken = [values[name] if name in inputs else _copied(values[name]) for name in entry.inputs]
                outputs = dict(zip(entry.outputs, stage(*taken), strict=True))
                for edge in self.bundle.edges:
                    if edge.name in outputs and (problem := _misfit(edge, outputs[edge.name], sizes)):
                        raise RoadsDifferError(f"a stage returns what is not stated: {edge.name}: {problem}")
                values.update(outputs)
            return [values[name] for name in self.results]

        return self._repeat(run)

    def plain(self) -> list[Answers | str]:
        model = PlainModel(self.bundle, whole_graph(self.bundle))

        def run(inputs: dict[str, Any]) -> list[Any]:
            try:
                return model.run(self._values(inputs), self.results)
            except Exception as error:  # noqa: BLE001 - of whatever operator
                raise StageFailedError(str(error)) from None

        return self._repeat(run)

    def sequences(self, pipeline: Any) -> list[Answers | str]:
        """Two sequences that take turns."""
        sequences = [pipeline.executor.begin_sequence() for _ in range(2)]

        def run(inputs: dict[str, Any]) -> list[Any]:
            turns = []
            for sequence, copies in zip(
                sequences, ({name: value.clone() for name, value in inputs.items()}, inputs), strict=True
            ):
                torch.manual_seed(7)
                values = self._values(copies)
                kept = dict(values)
                values = pipeline.executor.submit(values, {}, sequence).result()
                turns.append([torch.as_tensor(_copied({**kept, **values}[name])) for name in self.results])
            if not _are_same(*turns):
                raise RoadsDifferError("two sequences: other answers in one of them")
            return turns[1]

        return self._repeat(run)

    def recut(self, out: Path, choose: random.Random, *, stages: int) -> list[Answers | str]:
        written = stagepack.recut(self.bundle, out=out, stages=stages)
        try:
            written.verify()
            selected = written.select(self.bundle.entry_point.name)
            pipeline = stagepack.load(selected)
            differences = compare_bundles(self.bundle.select(self.bundle.entry_point.name), selected)
        except StagepackError as error:
            raise RoadsDifferError(f"recut wrote what is refused: {error}") from None
        stated = {name for stage in self.bundle.stages for name in stage.state}
        derived = {name for stage in selected.stages for name in stage.state}
        lines = [line for line in differences.graph if stated == derived or not line.startswith("the state")]
        lines = [line for line in lines if line != "features: differs"]  # that a bundle does not need
        if lines or differences.weights:
            raise RoadsDifferError(f"recut wrote another model: {[*lines, *differences.weights.items()][:3]}")
        return self.pipeline(pipeline)

    def onnx(self) -> list[Answers | str]:
        runtime = ["onnxruntime" if stage.onnx else "torch" for stage in self.bundle.stages]
        return self.pipeline(stagepack.load(self.bundle, runtime=runtime))

    def processes(self) -> list[Answers | str]:
        """Each stage in a process, forked from this one."""
        with patch.object(LocalLauncher, "_launch", _fork), stagepack.load(self.bundle, processes=True) as pipeline:
            return self.pipeline(pipeline)


def _fork(_: LocalLauncher, description: ProcessDescription) -> ForkedProcess:
    fork = multiprocessing.get_context("fork")
    return ForkedProcess(fork.Process(target=stage_process.run_process, args=(description,), daemon=True))


def _with_other_sizes(bundle: Bundle, inputs: dict[str, Any], choose: random.Random) -> dict[str, Any]:
    """Inputs with other sizes in the stated ranges, if there are any: their elements are those of the inputs, repeated or left out."""
    if {edge.name for edge in bundle.entry_point.inputs} != inputs.keys():
        return inputs
    sizes = {}
    for symbol in bundle.entry_point.symbols:
        example = 2 if symbol.example is None else symbol.example
        low = 0 if symbol.min is None else symbol.min
        high = example + 3 if symbol.max is None else symbol.max
        sizes[symbol.name] = min(max(choose.choice([low, low + 1, example + 1, 2 * example]), low), high, 64)
    resized = dict(inputs)
    for edge in bundle.entry_point.inputs:
        try:
            shape = [evaluate_dim(dim, sizes) for dim in edge.shape]
            if edge.dtype in SCALAR_DTYPES and edge.expr is not None:
                resized[edge.name] = torch.tensor(evaluate_dim(edge.expr, sizes))
        except (KeyError, StagepackError):
            return inputs
        value = inputs[edge.name]
        if len(shape) != value.dim() or 0 in value.shape:
            continue
        for dim, size in enumerate(shape):
            value = value.index_select(dim, torch.arange(size) % value.shape[dim])
        resized[edge.name] = value
    return resized


def _misfit(edge: Edge, value: Any, sizes: Mapping[str, int]) -> str:
    """How a value differs from what its edge states, or nothing."""
    if edge.dtype in SCALAR_DTYPES:
        type_name = {"symint": "int", "symfloat": "float", "symbool": "bool"}[edge.dtype]
        return "" if type(value).__name__ == type_name else f"expected {type_name}, found {type(value).__name__}"
    dtype = str(value.dtype).removeprefix("torch.")
    with contextlib.suppress(KeyError, StagepackError):  # a size that depends on data
        shape = tuple(evaluate_dim(dim, sizes) for dim in edge.shape)
        if (dtype, tuple(value.shape)) != (edge.dtype, shape):
            return f"expected {edge.dtype}{list(shape)}, found {dtype}{list(value.shape)}"
    return ""


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _are_same(first: Answers, second: Answers, *, is_exact: bool = True) -> bool:
    """Whether answers are equal to the bit; NaN equals NaN."""
    if not is_exact:
        return len(first) == len(second) and all(
            compare_arrays(TORCH_ARRAYS, b, a).within for a, b in zip(first, second, strict=True)
        )
    return len(first) == len(second) and all(map(_is_same, first, second))


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    octets = [
        tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)
    ]
    return torch.equal(*octets) or torch.equal(first.nan_to_num(3), second.nan_to_num(3))
