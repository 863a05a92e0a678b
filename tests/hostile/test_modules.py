"""Calls of modules that lie: whatever they say, a stage that runs by them answers as it does without, or is refused."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert
from msgspec.structs import replace

import stagepack
from stagepack.errors import LimitError
from stagepack.format.folded_graph import trivially_folded
from stagepack.format.graph import Graph, ModuleCall
from stagepack.format.graph_codec import encode_graph
from stagepack.format.traversal import output_names
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from stagepack_loaders.local_pipeline import Pipeline
from tests.bundle_editor import BundleEditor
from tests.zoo.case import Case, answers, assert_equal
from tests.zoo.cases import named

MODELS = named(
    "regions-regions", "state-cache-by-index-copy", "aliasing-views-of-views-written", "shapes-arithmetic-on-sizes"
)


def nested(chance: random.Random, start: int, end: int, path: str = "", depth: int = 0) -> Iterator[dict[str, Any]]:
    """Calls of random runs of nodes, one inside another or after it."""
    while start < end:
        first = chance.randint(start, end - 1)
        after = chance.randint(first + 1, end)
        name = f"{path}{chance.choice(['m', 'weight', 'a@b'])}{first}{chance.choice(['', '@1'])}"
        yield {"path": name, "first": str(first), "nodes": after - first}
        if depth < 5 and chance.random() < 0.8:
            yield from nested(chance, first, after, f"{name}.", depth + 1)
        start = after


def signature(chance: random.Random, names: list[str]) -> dict[str, Any]:
    """A signature of any values."""

    def tree() -> dict[str, Any]:
        if chance.random() < 0.3:
            items = [tree() for _ in range(chance.randint(0, 2))]
            return {"type": "sequence", "kind": chance.choice(["tuple", "list"]), "items": items}
        return {"type": "value", "name": chance.choice(names)}

    parameters = [
        {"name": f"p{number}", "tree": tree(), **({"positional": True} if number < 2 else {})}
        for number in range(chance.randint(0, 3))
    ]
    return {"parameters": parameters, "result": tree()}


def lies(graph: Graph, chance: random.Random) -> list[dict[str, Any]]:
    """Calls that keep the rules of the format, and nothing else."""
    names = [*(value.name for value in graph.inputs), *(weight.value for weight in graph.weights), "_", "nowhere"]
    names += [name for node in graph.nodes for name in output_names(node)]
    calls = [
        {**call, **({"signature": signature(chance, names)} if chance.random() < 0.8 else {})}
        for call in nested(chance, 0, len(graph.nodes))
    ]
    return list({call["path"]: call for call in calls}.values())


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_the_answer_stays_the_same(case: Case, tmp_path: Path) -> None:
    capture = case.capture()
    bundle = export_capture(capture, out=tmp_path / "m.stagepack", cut_options=CutOptions(stages=1))
    graph = bundle.graph(0)
    calls = [capture.inputs] * 2
    wanted = answers(stagepack.load(bundle, types=case.classes()), calls)
    for seed in range(25):
        editor = BundleEditor.copy(bundle.path, tmp_path / f"{seed}.stagepack")
        told = lies(graph, random.Random(seed))  # noqa: S311 - no secret
        editor.write_file(
            "stage-0.msgpack",
            encode_graph(trivially_folded(replace(graph, calls=convert(told, tuple[ModuleCall, ...])))),
        )
        stage = stagepack.load_stage(editor.path, 0, modules=True)
        pipe = Pipeline(bundle, [stage], case.classes())
        assert_equal(answers(pipe, calls), wanted)


def test_calls_nested_too_deep_are_refused(editor: BundleEditor) -> None:
    calls = [{"path": "a" * (number + 1), "first": "0", "nodes": 1} for number in range(65)]
    editor.edit_graph(0, lambda fields: fields.update(calls=calls))
    with pytest.raises(LimitError, match="module calls are nested deeper than 64"):
        stagepack.load_stage(editor.path, 0, modules=True)
