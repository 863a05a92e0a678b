"""Profiles: each node is measured; the times are those of the model in any cut, and choose a better cut where estimates are wrong."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

import stagepack
from stagepack.cli.profile_command import make_profile
from stagepack.errors import CutError, InputError, WriteError
from stagepack.format.graph import Cost, Graph, Node, Value
from stagepack.format.reader import Bundle, bundle_permissions
from stagepack.partition.costs import REFERENCE_LINK, GraphCosts, LinkCosts, graph_costs
from stagepack.partition.cut_options import CutOptions
from stagepack.partition.profile import (
    DEVICE_PROFILES,
    LinkTime,
    Profile,
    device_costs,
    measured_costs,
    model_digest,
    read_profile,
    write_profile,
)
from stagepack.roads.capture_writer import export_capture
from stagepack.roads.recut import plan_bundle, whole_graph
from stagepack_loaders.torch.measurement import measure_bundle
from tests.zoo.case import Case, files, stages_at_most
from tests.zoo.cases import named
from tests.zoo.test_zoo import name_of

# How long the blocks of the model take. Estimates see eight blocks that do the same.
MILLISECONDS = [30, 10, 10, 10, 1, 1, 1, 1]


class Clock:
    """Goes on by what naps take, and by a microsecond whenever it is read: what else the machine does takes no time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1e-6
        return self.seconds


CLOCK = Clock()


@torch.library.custom_op("naps::nap", mutates_args=())
def nap(x: torch.Tensor, milliseconds: int) -> torch.Tensor:
    CLOCK.seconds += milliseconds / 1000
    return x + 1


@nap.register_fake
def _(x: torch.Tensor, milliseconds: int) -> torch.Tensor:
    return torch.empty_like(x)


class Napping(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for milliseconds in MILLISECONDS:
            x = torch.ops.naps.nap(x, milliseconds)
        return x


@pytest.fixture(scope="module", autouse=True)
def _clock() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("stagepack_loaders.torch.measurement.time", SimpleNamespace(perf_counter=CLOCK))
        yield


@pytest.fixture(scope="module")
def napping(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("napping") / "napping.stagepack"
    return stagepack.export(Napping(), (torch.ones(4),), out=out, stages=3)


@pytest.fixture(scope="module")
def profile(napping: Bundle) -> Profile:
    return measured(napping, runs=5)


def measured(bundle: Bundle, runs: int = 1) -> Profile:
    """The profile of a bundle on this machine."""
    return make_profile(bundle, measure_bundle(bundle, allow_ops=bundle_permissions(bundle), runs=runs), runs)


def test_each_node_has_the_time_that_it_takes(napping: Bundle, profile: Profile) -> None:
    assert [node.node for node in profile.nodes] == list(range(8))
    assert {node.op for node in profile.nodes} == {"naps.nap.default"}
    for node, milliseconds in zip(profile.nodes, MILLISECONDS, strict=True):
        assert node.seconds == pytest.approx(milliseconds / 1000, abs=1e-4)
    assert sum(node.seconds for node in profile.nodes) == pytest.approx(sum(stage.seconds for stage in profile.stages))
    assert (profile.bundle, profile.runs, profile.sizes) == (napping.digest, 5, {})


def test_measured_times_choose_a_better_cut(napping: Bundle, profile: Profile, tmp_path: Path) -> None:
    by_estimate = stagepack.recut(napping, out=tmp_path / "estimate.stagepack", stages=2)
    by_profile = stagepack.recut(napping, out=tmp_path / "profile.stagepack", stages=2, profile=profile)
    assert [stage.nodes for stage in by_estimate.stages] == [4, 4]
    assert [stage.nodes for stage in by_profile.stages] == [1, 7]
    # As the stages run: 60 and 4 ms, against 30 and 34 ms.
    slowest = [max(stage.seconds for stage in measured(cut, runs=3).stages) for cut in (by_estimate, by_profile)]
    assert slowest == pytest.approx([60e-3, 34e-3], rel=0.01)


def test_a_bundle_does_not_depend_on_what_chose_its_cut(napping: Bundle, profile: Profile, tmp_path: Path) -> None:
    by_profile = stagepack.recut(napping, out=tmp_path / "profile.stagepack", stages=2, profile=profile)
    by_plan = stagepack.recut(napping, out=tmp_path / "plan.stagepack", plan=by_profile.entry_point.plan)
    assert files(by_profile.path) == files(by_plan.path)
    exported = stagepack.export(Napping(), (torch.ones(4),), out=tmp_path / "exported", stages=2, profile=profile)
    assert files(exported.path) == files(by_profile.path)


def test_a_profile_is_of_the_model_and_not_of_its_cut(napping: Bundle, profile: Profile, tmp_path: Path) -> None:
    digests = {model_digest(whole_graph(napping))}
    for stages in (1, 2, 5):
        again = stagepack.recut(napping, out=tmp_path / f"{stages}.stagepack", stages=stages)
        digests.add(model_digest(whole_graph(again)))
        partition = plan_bundle(again, CutOptions(stages=2, profile=profile))
        assert [sum(count for _, count in stage.nodes) for stage in partition.profiled_plan.stages] == [1, 7]
    assert digests == {profile.model}


def test_times_in_a_plan_are_those_of_its_nodes(napping: Bundle, profile: Profile) -> None:
    partition = plan_bundle(napping, CutOptions(stages=2, profile=profile))
    seconds = [node.seconds for node in profile.nodes]
    planned = [stage.picoseconds / 1e12 for stage in partition.profiled_plan.stages]
    assert planned == pytest.approx([seconds[0], sum(seconds[1:])])
    assert partition.plan.stages[1].picoseconds < partition.profiled_plan.stages[1].picoseconds
    assert partition.plan.stages[1].receiving == partition.profiled_plan.stages[1].receiving > 0


def test_nodes_without_a_time_get_a_scaled_estimate(napping: Bundle, profile: Profile) -> None:
    graph = whole_graph(napping)
    estimates = graph_costs(graph, {})
    partial = msgspec.structs.replace(profile, nodes=profile.nodes[1:4])
    found = measured_costs(graph, estimates, partial)
    assert found.measured_count == 3
    mean = sum(node.seconds for node in partial.nodes) / 3
    times = [time / 1e12 for time in found.costs.node_times]
    assert times[1:4] == pytest.approx([node.seconds for node in partial.nodes])
    assert [times[0], *times[4:]] == pytest.approx([mean] * 5)  # equal estimates
    assert found.scale == pytest.approx(mean * 1e12 / estimates.node_times[0])
    with pytest.raises(CutError, match="expected the time of at least one node"):
        measured_costs(graph, estimates, msgspec.structs.replace(profile, nodes=()))


def test_a_measured_link_takes_the_place_of_the_reference(napping: Bundle, profile: Profile) -> None:
    link = LinkTime(seconds_per_value=1e-3, seconds_per_byte=1e-6)
    partition = plan_bundle(napping, CutOptions(stages=2, profile=msgspec.structs.replace(profile, link=link)))
    received = partition.profiled_plan.stages[1]
    assert received.received == 16
    assert received.receiving == pytest.approx((1e-3 + 16e-6) * 1e12)
    assert partition.plan.stages[1].receiving == REFERENCE_LINK.sending_time(16)


def test_a_device_takes_the_place_of_the_reference(napping: Bundle, tmp_path: Path) -> None:
    partition = plan_bundle(napping, CutOptions(stages=2, profile="H100"))
    assert partition.measured is None
    assert {stage.memory_limit for stage in partition.plan.stages} == {80 * 10**9}
    times = {name: plan_bundle(napping, CutOptions(stages=2, profile=name)).profiled_plan for name in DEVICE_PROFILES}
    assert times["h100"].stages[1].receiving == LinkCosts(per_byte=1e12 / 450e9).sending_time(16)
    # What is written depends on the cut, and not on what chose it.
    reference = stagepack.recut(napping, out=tmp_path / "reference", stages=2, memory=["80GB", "80GB"])
    assert stagepack.recut(napping, out=tmp_path / "h100", stages=2, profile="h100").digest == reference.digest
    with pytest.raises(CutError, match=r"profile: expected a device \(v100, .*, mi300x\) or a file .*, found 'h1000'"):
        stagepack.recut(napping, out=tmp_path / "none", stages=2, profile="h1000")


def test_the_time_on_a_device_is_that_of_its_data_sheet() -> None:
    half = Value(name="y", dtype="bfloat16", shape=(4,))
    node = Node(op=0, outputs=(half,), cost=Cost(flops=989 * 10**12, bytes=10**9))
    graph = Graph(nodes=(node,))
    costs = GraphCosts(node_times=(1,), value_bytes={}, weight_bytes={})
    (seconds,) = (time / 1e12 for time in device_costs(graph, costs, DEVICE_PROFILES["h100"]).node_times)
    assert seconds == pytest.approx(1, rel=1e-5)
    (seconds,) = (time / 1e12 for time in device_costs(graph, costs, DEVICE_PROFILES["t4"]).node_times)
    assert seconds == pytest.approx(989 / 65, rel=1e-5)


def test_a_profile_of_another_model_is_refused(profile: Profile, tmp_path: Path) -> None:
    bundle = stagepack.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), out=tmp_path / "m.stagepack")
    with pytest.raises(CutError, match=r"profile: expected times of this model .*, found those of another one"):
        stagepack.recut(bundle, out=tmp_path / "again.stagepack", stages=1, profile=profile)
    assert not (tmp_path / "again.stagepack").exists()


def test_a_profile_is_written_and_read(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    write_profile(profile, path)
    assert read_profile(path) == stagepack.read_profile(path) == profile
    assert len(path.read_text().splitlines()) == len(profile.nodes) + len(profile.stages) + 15
    with pytest.raises(WriteError, match="cannot be written"):
        write_profile(profile, tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "expected a profile"),
        ({"model": None}, "expected a profile"),
        ({"nodes": [{"node": 0, "op": "", "module": "", "seconds": -1.0}]}, r"expected a profile.*>= 0"),
        ({"nodes": [{"node": 0, "op": "", "module": "", "seconds": 1e999}]}, "expected a profile"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(
    change: dict[str, Any], says: str, profile: Profile, tmp_path: Path
) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(msgspec.to_builtins(profile) | change))
    with pytest.raises(CutError, match=says):
        read_profile(path)
    for content in (b"", b"\xff", b"[]"):
        path.write_bytes(content)
        with pytest.raises(CutError, match="expected a profile"):
            read_profile(path)
    with pytest.raises(CutError, match="cannot be read"):
        read_profile(tmp_path / "missing.json")


# Each has nodes of another kind: written inputs, contexts, branches and loops, sizes that data tell, state, operators of others.
KINDS = [
    *named("aliasing-inputs-written"),
    *named("regions-no-grad-in-autocast-in-no-grad"),
    *named("regions-branches-and-loops"),
    *named("shapes-sizes-from-data"),
    *named("state-static-cache-decoder"),
    *named("operators-custom-operator-that-writes"),
    *named("values-strided-values-cross"),
]


@pytest.mark.parametrize("case", KINDS, ids=name_of)
def test_every_node_is_measured(case: Case, tmp_path: Path) -> None:
    if case.operators:
        importlib.import_module(case.operators)
    capture = case.capture()
    stages = CutOptions(stages=stages_at_most(3, capture))
    bundle = export_capture(capture, out=tmp_path / "m.stagepack", cut_options=stages)
    profile = measured(bundle)
    assert [node.node for node in profile.nodes] == list(range(len(whole_graph(bundle).nodes)))
    assert all(stage.seconds > 0 for stage in profile.stages if bundle.stages[stage.stage].nodes)
    plan_bundle(bundle, CutOptions(stages=2, profile=profile))


def test_inputs_of_another_size_are_measured(tmp_path: Path) -> None:
    rows = torch.export.Dim("rows", min=1, max=64)
    bundle = stagepack.export(
        torch.nn.Linear(4, 4), (torch.ones(2, 4),), out=tmp_path / "m.stagepack", dynamic_shapes={"input": {0: rows}}
    )
    save_file({bundle.edges[0].name: torch.ones(7, 4)}, tmp_path / "in.safetensors")
    assert measure_bundle(bundle, runs=1).sizes == {"rows": 2}
    assert measure_bundle(bundle, inputs_file=tmp_path / "in.safetensors", runs=1).sizes == {"rows": 7}
    with pytest.raises(InputError, match="expected a safetensors file"):
        measure_bundle(bundle, inputs_file=tmp_path / "missing.safetensors", runs=1)
