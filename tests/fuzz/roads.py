"""Every road to the answer of a bundle, compared to the bit: a bundle that one of them accepts says to all of them the same."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import stagepack
from stagepack.bundle_comparison import compare_bundles
from stagepack.errors import StagepackError
from stagepack.format.reader import Bundle
from stagepack.format.tree import tree_leaves
from stagepack.recutter import whole_graph
from stagepack_loaders.example import read_example_inputs
from stagepack_loaders.torch.arrays import TORCH_ARRAYS
from tests.fuzz.plain_run import PlainModel

CALLS = 3
# Of these the content is what the memory had before.
_WITHOUT_CONTENT = ("aten.empty", "aten.new_empty", "aten.resize")


class RoadsDifferError(Exception):
    """Two roads give different answers, or one refuses what another one wrote."""


def compare_roads(path: Path, original: Path, inputs: Mapping[str, dict[str, Any]], scratch: Path) -> None:
    """Compare all roads to each entry point of a bundle.

    Args:
        path: the bundle.
        original: the bundle that it was made of.
        inputs: inputs of a call, by entry point.
        scratch: an empty folder.

    Raises:
        RoadsDifferError: they differ.
        StagepackError: the bundle is refused.
    """
    bundle = stagepack.open(path)
    first = stagepack.open(original)
    if bundle.digest != first.digest and _is_equal(bundle, first):
        raise RoadsDifferError("diff says that bundles of two digests are equal")
    for entry_point in bundle.entry_points:
        selected = bundle.select(entry_point.name)
        given = inputs.get(entry_point.name)
        values = read_example_inputs(selected, TORCH_ARRAYS) if given is None else given
        with torch.no_grad():
            _compare_entry_point(selected, values, scratch / entry_point.name[:50])


def _is_equal(first: Bundle, second: Bundle) -> bool:
    try:
        return not compare_bundles(first, second)
    except StagepackError:
        return False


def _compare_entry_point(bundle: Bundle, inputs: dict[str, Any], scratch: Path) -> None:
    pipeline = stagepack.load(bundle)  # refused or not
    graphs = [bundle.graph(stage_number) for stage_number in range(len(bundle.stages))]
    names = [op.name for graph in graphs for op in graph.ops]
    if any(name.startswith(_WITHOUT_CONTENT) for name in names):
        return
    call = _Call(bundle, inputs)
    answers = _outcome(lambda: call.pipeline(pipeline))
    if isinstance(answers, str):
        return
    pipeline.reset_state()
    roads: dict[str, Callable[[], list[Any]]] = {
        "after reset_state": lambda: call.pipeline(pipeline),
        "stages apart": call.stages_apart,
        "node by node": call.plain,
        "one of two sequences": lambda: call.sequences(stagepack.load(bundle)),
        "all stages in one": lambda: call.recut(scratch.with_suffix(".1"), stages=1),
        "other stages": lambda: call.recut(scratch.with_suffix(".2"), stages=2),
    }
    for road, run in roads.items():
        found = _outcome(run)
        if isinstance(found, str):
            # What a recut refuses is not written. Of module calls, which only a join reads, stages may say different things.
            # They need not state positions, without which there is no join.
            is_refused_join = "the call of" in found or found.startswith("CutError: the bundle does not record")
            if road not in ("all stages in one", "other stages") and not is_refused_join:
                raise RoadsDifferError(f"{road}: refused where one process answers: {found}")
        elif not _are_same(answers, found):
            raise RoadsDifferError(f"{road}: other answers than one process")


def _outcome(run: Callable[[], list[Any]]) -> list[Any] | str:
    try:
        return run()
    except StagepackError as error:
        return f"{type(error).__name__}: {error}"


class _Call:
    """Three calls in a row with the same inputs, by each road. The random generators are seeded before each call."""

    def __init__(self, bundle: Bundle, inputs: dict[str, Any]) -> None:
        self.bundle = bundle
        self.inputs = inputs
        self.results = [leaf.name for leaf in tree_leaves(bundle.entry_point.signature.result) if hasattr(leaf, "name")]

    def _fresh_inputs(self) -> dict[str, Any]:
        torch.manual_seed(7)
        return {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in self.inputs.items()
        }

    def _repeat(self, run: Callable[[dict[str, Any]], list[Any]]) -> list[Any]:
        answers = []
        for _ in range(CALLS):
            inputs = self._fresh_inputs()
            answers.append(_copied([*run(inputs), *inputs.values()]))
        return answers

    def pipeline(self, pipeline: Any) -> list[Any]:
        def run(inputs: dict[str, Any]) -> list[Any]:
            values = dict(inputs)
            kept = {name: value for name, value in values.items() if name in self.results}
            for stage_number in range(len(pipeline.stages)):
                pipeline.run_stage(stage_number, values)
            return [{**kept, **values}[name] for name in self.results]

        return self._repeat(run)

    def stages_apart(self) -> list[Any]:
        """Each stage loaded by itself, with values that share no memory, as in processes."""
        stages = [stagepack.load_stage(self.bundle, number) for number in range(len(self.bundle.stages))]

        def run(inputs: dict[str, Any]) -> list[Any]:
            values = dict(inputs)
            for stage, entry in zip(stages, self.bundle.stages, strict=True):
                # An input of the model is the caller's, and what is written to it comes back.
                taken = [values[name] if name in inputs else _copied([values[name]])[0] for name in entry.inputs]
                values.update(zip(entry.outputs, stage(*taken), strict=True))
            return [values[name] for name in self.results]

        return self._repeat(run)

    def plain(self) -> list[Any]:
        model = PlainModel(self.bundle, whole_graph(self.bundle))
        return self._repeat(lambda inputs: model.run(inputs, self.results))

    def sequences(self, pipeline: Any) -> list[Any]:
        """Two sequences that take turns."""
        turns: list[list[Any]] = [[], []]
        states: list[dict[int, Any]] = [{}, {}]
        for _ in range(CALLS):
            for turn, state in zip(turns, states, strict=True):
                inputs = self._fresh_inputs()
                values = dict(inputs)
                for stage_number, stage in enumerate(pipeline.stages):
                    fresh = state.pop(stage_number, None) if self.bundle.stages[stage_number].state else None
                    has_state = bool(self.bundle.stages[stage_number].state)
                    previous = stage.swap_state(fresh or stage.fresh_state()) if has_state else None
                    pipeline.run_stage(stage_number, values)
                    if has_state:
                        state[stage_number] = stage.swap_state(previous)
                results = [{**inputs, **values}[name] for name in self.results]
                turn.append(_copied([*results, *inputs.values()]))
        if not _are_same(*turns):
            raise RoadsDifferError("two sequences: other answers in one of them")
        return turns[1]

    def recut(self, out: Path, *, stages: int) -> list[Any]:
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
        if lines or differences.weights:
            raise RoadsDifferError(f"recut wrote another model: {[*lines, *differences.weights.items()][:3]}")
        return _Call(selected, self.inputs).pipeline(pipeline)


def _copied(values: list[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


def _are_same(first: list[Any], second: list[Any]) -> bool:
    """Whether answers are equal to the bit; NaN equals NaN."""
    return len(first) == len(second) and all(
        len(a) == len(b) and all(map(_is_same, a, b)) for a, b in zip(first, second, strict=True)
    )


def _is_same(first: Any, second: Any) -> bool:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return type(first) is type(second) and (first == second or first != first)
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    octets = [
        tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)
    ]
    return torch.equal(*octets) or torch.equal(first.nan_to_num(3), second.nan_to_num(3))
