"""One model on every road: as it is, as its program, as bundles with several cuts, in ONNX Runtime, and in processes."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from stagepack.capture.programs import Capture
from stagepack.capture.torch_messages import suppress_warnings
from stagepack.errors import CutError, StagepackError
from stagepack.format.operators import needed_permissions
from stagepack.format.reader import Bundle
from stagepack.format.traversal import random_nodes
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import ExportOptions, export_capture
from stagepack.roads.onnx.add import add_onnx
from stagepack.roads.onnx.other_sizes import format_sizes, inputs_at, sizes_to_check
from stagepack_loaders import example
from stagepack_loaders.comparison import Difference, Tolerance, format_difference
from stagepack_loaders.load import load
from stagepack_loaders.pipeline import CallablePipeline

_STAGE_COUNTS = (1, 2, 3)
_EXACT = Tolerance(0.0, 0.0)
_SEED = 0

Values = Mapping[str, Any]


class _Road(NamedTuple):
    """A way to run the model.

    Attributes:
        label: what it is, for people.
        run: computes the results from inputs by edge name.
        tolerance: how far results may be from those of the program; None for that of each dtype.
        may_answer: it may answer where the program raises.
    """

    label: str
    run: Callable[[Values], Values]
    tolerance: Tolerance | None = _EXACT
    may_answer: bool = False


class _Module:
    """A module that is called as a pipeline is. It is copied for each call, so that its state begins anew."""

    def __init__(self, module: torch.nn.Module, pipeline: CallablePipeline) -> None:
        self.entry_point, self.arrays = pipeline.entry_point, pipeline.arrays
        self._module = module

    def inference(self) -> AbstractContextManager[None]:
        """Return a context for calls that need no gradients."""
        return cast("AbstractContextManager[None]", torch.no_grad())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return copy.deepcopy(self._module)(*args, **kwargs)


def disagreements(capture: Capture, folder: Path, *, processes: bool) -> Iterator[str]:
    """Compare what the captured program answers with every other road, at the sizes of the example and at others that the bundle allows.

    folder: an empty folder for bundles.
    """
    bundles = list(_cuts(capture, folder))
    with ExitStack() as open_pipelines:
        pipeline = _loaded(bundles[0])
        program = _road("the captured program", _Module(capture.program.module(), pipeline))
        roads = list(_roads(capture, bundles, pipeline, open_pipelines, processes=processes))
        example_inputs = example.read_example_inputs(bundles[0], pipeline.arrays)
        calls: list[tuple[str, Values]] = [("the example", _as_arrays(pipeline, example_inputs))]
        for sizes in sizes_to_check(bundles[0]):
            for resized_inputs in inputs_at(bundles[0], example_inputs, sizes):
                calls.append((format_sizes(sizes), _as_arrays(pipeline, resized_inputs)))
        for call_number, (place, inputs) in enumerate(calls):
            expected = _outcome(program, inputs)
            if isinstance(expected, Exception) and call_number == 0:
                yield f"no road is compared: the captured program refuses the example in plain containers: {expected}"
                return
            for road in roads:
                if problem := _problem(pipeline, road, expected, _outcome(road, inputs)):
                    yield f"{road.label}, {place}: {problem}"


def _cuts(capture: Capture, folder: Path) -> Iterator[Bundle]:
    """The model as bundles of 1, 2 and 3 stages, as far as it has nodes for them."""
    for stage_count in _STAGE_COUNTS:
        out = folder / f"{stage_count}.stagepack"
        try:
            # Where the program differs from the model, the comparison says it.
            options = ExportOptions(allow_difference=True)
            yield export_capture(capture, out=out, cut_options=CutOptions(stages=stage_count), options=options)
        except CutError:
            if stage_count == _STAGE_COUNTS[0]:
                raise
            return


def _roads(
    capture: Capture, bundles: list[Bundle], pipeline: CallablePipeline, open_pipelines: ExitStack, *, processes: bool
) -> Iterator[_Road]:
    if capture.model is not None:
        yield _road("the model itself", _Module(capture.model, pipeline), tolerance=None)
    for bundle in bundles:
        yield _road(f"a bundle of {len(bundle.stages)} stages", _loaded(bundle))
    if processes:
        distributed = load(bundles[-1], allow_ops=_permissions(bundles[-1]), processes=True)
        yield _road("processes", open_pipelines.enter_context(distributed))
    graphs = [bundles[0].graph(stage_number) for stage_number in range(len(bundles[0].stages))]
    if not any(map(random_nodes, graphs)):  # ONNX Runtime draws random numbers of its own
        add_onnx(bundles[0], allow_ops=_permissions(bundles[0]))
        with_onnx = Bundle(bundles[0].path)
        if all(stage.onnx is not None for stage in with_onnx.stages):
            runtime = load(with_onnx, runtime="onnxruntime")
            yield _road("ONNX Runtime", runtime, tolerance=None, may_answer=True)


def _road(label: str, model: Any, *, tolerance: Tolerance | None = _EXACT, may_answer: bool = False) -> _Road:
    def run(inputs: Values) -> Values:
        if isinstance(model, CallablePipeline):
            model.reset_state()
            model.seed(_SEED)
        torch.manual_seed(_SEED)
        return example.run_on_inputs(model, inputs)

    return _Road(label, run, tolerance, may_answer)


def _outcome(road: _Road, inputs: Values) -> Values | Exception:
    """The results of a call with copies of inputs, or its error."""
    try:
        with suppress_warnings():
            return road.run(copy.deepcopy(inputs))
    except Exception as error:  # noqa: BLE001 - errors are compared, too
        return error


def _problem(
    pipeline: CallablePipeline, road: _Road, expected: Values | Exception, answer: Values | Exception
) -> str | None:
    """How an answer is not what is expected; None if it is."""
    if isinstance(answer, Exception):
        summary = f"{type(answer).__name__}: {str(answer)[:200]}"
        if not isinstance(expected, Exception):
            return f"raises {summary}, where the captured program answers"
        is_typed = road.tolerance is None or isinstance(answer, StagepackError)
        return None if is_typed else f"raises {summary}, which is no error of stagepack"
    if isinstance(expected, Exception):
        return (
            None
            if road.may_answer or road.tolerance is None
            else f"answers, where the captured program raises {expected}"
        )
    difference = _difference(pipeline, answer, expected, road.tolerance)
    return (
        None if difference.within else f"differs from the captured program by {format_difference(difference.largest)}"
    )


def _difference(
    pipeline: CallablePipeline, answer: Values, expected: Values, tolerance: Tolerance | None
) -> Difference:
    to_host = {name: pipeline.arrays.array(torch.as_tensor(value)) for name, value in answer.items()}
    return example.compare_results(pipeline, to_host, expected, tolerance)


def _as_arrays(pipeline: CallablePipeline, inputs: Values) -> Values:
    return {name: pipeline.arrays.array(value) for name, value in inputs.items()}


def _loaded(bundle: Bundle) -> CallablePipeline:
    return load(bundle, allow_ops=_permissions(bundle))


def _permissions(bundle: Bundle) -> list[str]:
    """What the operators of a bundle need to be allowed: the caller runs the code of the model anyway."""
    return sorted(needed_permissions([bundle.graph(stage_number) for stage_number in range(len(bundle.stages))]))
