"""Consecutive stages that are joined when they are loaded: the graph that a cut into fewer stages has, of their own files alone."""

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from msgspec import structs

import stagepack
from stagepack.cli import main
from stagepack.errors import CutError, DeviceError, OptionError
from stagepack.format.reader import Bundle
from stagepack.graph.region_functions import RegionCallSite, folded_functions, region_functions
from stagepack.partition.cut_options import CutOptions
from stagepack.partition.joined_bundle import join_bundle
from stagepack.partition.profile import NodeTime, Profile, model_digest, read_profile, write_profile
from stagepack.roads.capture_writer import export_capture
from stagepack.roads.recut import whole_graph
from stagepack_loaders.run_trace import RunTrace
from stagepack_loaders.torch.stage import TorchStage
from tests.distributed.forked_processes import forked_launches
from tests.serve.local_server import refusal
from tests.zoo import case as zoo_case
from tests.zoo.cases import named

WIDTH = 16


class Layers(torch.nn.Module):
    """Layers that share a weight, with a counter in one of them, and a value that skips over some."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(32, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = hidden = self.embed(ids)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden).relu() + ids.shape[0]
            if number == 3:
                self.calls.add_(1)
                hidden = hidden + self.calls
        return (hidden + first) @ self.embed.weight.T


IDS = torch.arange(12).reshape(3, 4)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Seven stages: the first has the embedding alone."""
    return stagepack.export(
        Layers().eval(),
        (IDS,),
        dynamic_shapes={"ids": {0: torch.export.Dim("rows", min=1, max=64)}},
        out=tmp_path_factory.mktemp("joined") / "fine.stagepack",
        split_at=[f"layers.{number}" for number in range(6)],
    )


def functions_of(bundle: Bundle, number: int) -> list[tuple[object, ...]]:
    """The regions of a stage as functions: where each is called, its length, its inputs and its outputs."""
    folded, graph = bundle.graph_file(number)
    items, functions = region_functions(folded_functions(folded, graph), graph)
    calls = [(item.start, item.region) for item in items if isinstance(item, RegionCallSite)]
    facts = [(function.call_count, function.length, function.inputs, function.outputs) for function in functions]
    return [*calls, *facts]


def answers(pipeline: Any) -> list[torch.Tensor]:
    """The answers to three calls of other sizes."""
    return [pipeline(IDS[:rows]) for rows in (3, 1, 2)]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(value, other) for value, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("counts", [[7], [1, 6], [3, 4], [2, 2, 3], [1, 1, 4, 1]])
def test_a_joined_stage_has_the_graph_of_a_cut_into_fewer_stages(
    bundle: Bundle, counts: list[int], tmp_path: Path
) -> None:
    starts = [sum(counts[:number]) for number in range(1, len(counts))]
    coarse = stagepack.recut(
        bundle, out=tmp_path / "coarse.stagepack", split_at=[f"layers.{start - 1}" for start in starts]
    )
    joined = join_bundle(bundle, counts)
    for number in range(len(counts)):
        graph, expected = joined.graph(number), coarse.graph(number)
        # A size may be read off another tensor that has it.
        added = joined.node_numbers(number).count(-1)
        assert added == coarse.stages[number].added
        assert graph.nodes[added:] == expected.nodes[added:]
        assert structs.replace(graph, nodes=()) == structs.replace(expected, nodes=())
        assert functions_of(joined, number) == functions_of(coarse, number)
        assert folded_functions(*joined.graph_file(number)) == joined.graph_file(number).folded
    for stage, other in zip(joined.stages, coarse.stages, strict=True):
        assert (stage.inputs, stage.outputs, set(stage.state)) == (other.inputs, other.outputs, set(other.state))
        assert other.weight_bytes <= stage.weight_bytes < other.weight_bytes + 2000  # headers of files
    assert joined.edges == coarse.edges


@pytest.mark.parametrize(
    "options",
    [
        {"devices": ["cpu", "cpu"]},
        {"devices": ["cpu"] * 3, "stages_per_device": [4, 0, 3]},
        {"devices": "auto"},
        {"stages_per_device": [7]},
        {"devices": ["cpu", "cpu"], "speeds": [1, 4]},
        {"devices": ["cpu", "cpu"], "stream": True},
        {"devices": ["cpu", "cpu"], "device_memory": "5kB"},
        {"devices": ["cpu", "cpu"], "copy": True, "verify": "manifest"},
    ],
    ids=str,
)
def test_answers_are_those_of_the_stages(bundle: Bundle, options: dict[str, Any]) -> None:
    pipeline = stagepack.load(bundle, **options)
    expected = answers(stagepack.load(bundle))
    assert_equal(answers(pipeline), expected)
    pipeline.reset_state()
    assert_equal(answers(pipeline), expected)
    assert len(pipeline.stages) == len(pipeline.placement.parts) < 7
    assert sum(len(part.stages) for part in pipeline.placement.parts) == 7


def test_devices_of_each_stage_and_one_device_join_nothing(bundle: Bundle) -> None:
    assert len(stagepack.load(bundle).stages) == 7
    assert len(stagepack.load(bundle, device="cpu").stages) == 7
    assert len(stagepack.load(bundle, devices=["cpu"] * 7).stages) == 7


def test_a_pipeline_of_joined_stages_is_copied_moved_and_traced(bundle: Bundle) -> None:
    pipeline = stagepack.load(bundle, devices=["cpu", "cpu"])
    expected = stagepack.load(bundle)
    assert pipeline.state_dict().keys() == expected.state_dict().keys()
    assert len(list(pipeline.parameters())) == len(list(expected.parameters()))
    copied = copy.deepcopy(pipeline)
    with pipeline.trace() as trace:
        assert_equal(answers(pipeline), answers(expected))
    assert isinstance(trace, RunTrace)
    assert {span.stage for span in trace.spans if span.stage is not None} == {0, 1}
    expected.reset_state()
    assert_equal(answers(copied.to("cpu")), answers(expected))


def test_only_the_files_of_the_joined_stages_are_read(bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "part.stagepack"
    shutil.copytree(bundle.path, folder)
    own_files = {name for stage in bundle.stages[2:5] for name in (*stage.graph_files, *stage.weights)}
    for name in bundle.files.keys() - own_files:
        (folder / name).unlink()
    stage = stagepack.load_stage(folder, stages=range(2, 5))
    assert isinstance(stage, TorchStage)
    hidden = torch.randn(3, 4, WIDTH)
    (result,) = stage(hidden)
    for number in range(2, 5):
        (hidden,) = stagepack.load_stage(bundle, number)(hidden)
    assert torch.equal(result, hidden)


def test_joined_stages_run_by_their_modules(bundle: Bundle) -> None:
    stage = stagepack.load_stage(bundle, stages=range(1, 4), modules=True)
    hidden = torch.randn(2, 4, WIDTH)
    layer = stage.get_submodule("layers.1")
    assert torch.equal(layer(hidden), Layers().layers[1](hidden))


def test_joined_stages_are_joined_again(bundle: Bundle) -> None:
    joined = stagepack.load(bundle, devices=["cpu"] * 3).bundle
    expected = answers(stagepack.load(bundle))
    again = stagepack.load(joined, devices=["cpu", "cpu"])
    assert_equal(answers(again), expected)
    assert sum(len(part.stages) for part in again.placement.parts) == 7
    assert len(stagepack.load(joined).stages) == 3
    assert [*stagepack.load_stage(joined, stages=range(2)).state_dict()]


def test_bundles_are_made_of_the_stored_stages(bundle: Bundle, tmp_path: Path) -> None:
    joined = stagepack.load(bundle, devices=["cpu"] * 3).bundle
    assert len(stagepack.recut(joined, out=tmp_path / "two.stagepack", stages=2).stages) == 2
    shutil.copytree(bundle.path, tmp_path / "copied.stagepack")
    copied = stagepack.load(tmp_path / "copied.stagepack", devices=["cpu"] * 3).bundle
    assert len(stagepack.add_onnx(copied).bundle.stages) == 7
    copied.verify()


def test_a_copy_keeps_the_placement(bundle: Bundle) -> None:
    pipeline = stagepack.load(bundle, devices=["cpu", "cpu"], speeds=[1, 4])
    assert copy.deepcopy(pipeline).placement == pipeline.placement


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, OptionError, "expected one of them"),
        ({"stage": 1, "stages": range(1, 3)}, OptionError, "expected one of them"),
        ({"stages": range(3, 3)}, OptionError, "expected consecutive numbers"),
        ({"stages": range(0, 6, 2)}, OptionError, "expected consecutive numbers"),
        ({"stages": [1, 2]}, OptionError, "expected consecutive numbers"),
        ({"stages": range(5, 9)}, IndexError, "expected a stage from 0 to 6, found 8"),
        ({"stages": range(-2, 2)}, IndexError, "expected a stage from 0 to 6, found -2"),
        ({"stages": range(1, 3), "runtime": "onnxruntime"}, OptionError, "does not join stages"),
    ],
    ids=str,
)
def test_ranges_of_stages_that_do_not_fit_are_refused(
    bundle: Bundle, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        stagepack.load_stage(bundle, **arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory": ["1GB", "1GB"]}, OptionError, "memory: expected 1 values, one for each device, found 2"),
        ({"memory": "1GB"}, OptionError, "memory: expected a list"),
        ({"speeds": [0.0]}, OptionError, "speeds: cpu: expected a number"),
        ({"links": ["network=1GB/s"]}, OptionError, "link: expected NAME=BANDWIDTH"),
        ({"links": ["host=1GB/s", "host=2GB/s"]}, OptionError, "link: expected one of the name host, found two"),
        ({"links": [3]}, OptionError, "links: expected items of str, found 3"),
        ({"speeds": ["a"]}, OptionError, "speeds: expected items of int | float, found 'a'"),
        ({"profiles": ["h100", "t4"]}, OptionError, "expected one for all devices, found two"),
        ({"profiles": ["nowhere.json"]}, CutError, "profile: expected a device"),
        ({"profiles": "h100"}, OptionError, "profiles: expected a list"),
        ({"memory": [None]}, OptionError, "memory: expected items of int | str, found None"),
        ({"stages_per_device": [True]}, OptionError, "stages_per_device: expected items of int, found True"),
        ({"devices": ["nonsense", "cpu"], "speeds": [1, 1e5]}, DeviceError, "nonsense"),
        ({"stages_per_device": [3, 3]}, OptionError, "expected 1 numbers, one for each device"),
        ({"devices": ["cpu", "cpu"], "stages_per_device": [3, 3]}, OptionError, "with the sum 6"),
        ({"devices": ["auto", "cpu"]}, OptionError, "expected 'auto' alone"),
        ({"memory": ["1kB"]}, DeviceError, "no placement fits"),
    ],
    ids=str,
)
def test_placements_that_do_not_fit_are_refused(
    bundle: Bundle, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        stagepack.load(bundle, **options)


@pytest.fixture
def slow_end(bundle: Bundle, tmp_path: Path) -> Path:
    """Times of the model, in which each stage takes ten times as long as the one before."""
    times = [
        NodeTime(node=node, op="", module="", seconds=10.0**number)
        for number in range(len(bundle.stages))
        for node in bundle.node_numbers(number)
        if node >= 0
    ]
    profile = Profile(
        model=model_digest(whole_graph(bundle)),
        bundle=bundle.digest,
        machine="m",
        torch="2",
        threads=1,
        runs=1,
        sizes={},
        stages=(),
        nodes=tuple({time.node: time for time in times}.values()),
    )
    write_profile(profile, tmp_path / "times.json")
    return tmp_path / "times.json"


def counts_of(pipeline: Any) -> list[int]:
    return [len(part.stages) for part in pipeline.placement.parts]


def test_measured_times_decide_what_a_device_gets(bundle: Bundle, slow_end: Path) -> None:
    even = counts_of(stagepack.load(bundle, devices=["cpu", "cpu"], speeds=[1, 1]))
    assert counts_of(stagepack.load(bundle, devices=["cpu", "cpu"], profiles=[str(slow_end)])) == [6, 1] != even
    assert counts_of(stagepack.load(bundle, devices=["cpu", "cpu"], profiles=[f"cpu={slow_end}"])) == [6, 1]
    arguments = ["load", str(bundle.path), *["--device", "cpu"] * 2, "--profile", str(slow_end)]
    result = CliRunner().invoke(main, arguments)
    assert "placed: stages 0 to 5 on cpu, stage 6 on cpu;" in result.stdout, result.output


@pytest.mark.process
def test_measured_times_decide_what_a_process_gets(bundle: Bundle, slow_end: Path) -> None:
    with stagepack.load(bundle, processes=2, profiles=[str(slow_end)]) as pipeline:
        assert counts_of(pipeline) == [6, 1]


def test_measured_times_of_another_model_are_refused(bundle: Bundle, slow_end: Path) -> None:
    write_profile(structs.replace(read_profile(slow_end), bundle="", model="another"), slow_end)
    with pytest.raises(CutError, match="expected times of this model"):
        stagepack.load(bundle, devices=["cpu", "cpu"], profiles=[str(slow_end)])


@pytest.mark.process
def test_processes_run_joined_stages_and_read_their_files_alone(bundle: Bundle) -> None:
    expected = answers(stagepack.load(bundle))
    with forked_launches(), stagepack.load(bundle, processes=2, stages_per_device=[3, 4]) as pipeline:
        assert_equal(answers(pipeline), expected)
        facts = pipeline.stage_facts
    assert [fact.rank for fact in facts] == [1, 2]
    for fact, stages in zip(facts, (bundle.stages[:3], bundle.stages[3:]), strict=True):
        assert set(fact.files) == {name for stage in stages for name in (stage.graph, *stage.weights)}


class Halves(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.second(x).relu())


def test_a_server_places_each_entry_point_as_asked(tmp_path: Path) -> None:
    inputs = stagepack.Inputs(args=(torch.ones(1, WIDTH),))
    path = tmp_path / "m.stagepack"
    stagepack.export(Halves(), entry_points={"encode": inputs, "decode": inputs}, out=path, stages=2)
    assert "m.stagepack#encode: memory: no placement fits" in refusal(path, "--memory", "1kB")


def test_stages_that_both_read_a_size_are_joined_where_the_later_one_computes_it(tmp_path: Path) -> None:
    """The last stage reads the length after this call off a cache that the one before has made longer."""
    [case] = named("containers-cache-of-any-length")
    capture = case.capture()
    wanted = zoo_case.captured_answers(capture, [capture.inputs])
    stored = export_capture(capture, out=tmp_path / "caches.stagepack", cut_options=CutOptions(stages=5))
    for counts in ([3, 2], [1, 3, 1], [5]):
        pipeline = stagepack.load(join_bundle(stored, counts), types=case.classes())
        zoo_case.assert_equal(zoo_case.answers(pipeline, [capture.inputs]), wanted)
