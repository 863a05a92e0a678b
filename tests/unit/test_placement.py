"""The placement of a bundle's stages: from its manifest alone, for devices, links and measured times that are given."""

import dataclasses
import itertools
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import stagepack
from stagepack.errors import CutError, DeviceError, OptionError
from stagepack.format.plan import run_members
from stagepack.format.reader import Bundle
from stagepack.partition.costs import LinkCosts
from stagepack.partition.cut_options import CutOptions
from stagepack.partition.joined_bundle import join_bundle
from stagepack.partition.links import Link, link_text, parse_link
from stagepack.partition.placement import Placement, improvements, place
from stagepack.partition.profile import DEVICE_PROFILES, LinkTime, NodeTime, Profile
from stagepack.partition.target_devices import TargetDevice, stage_times
from stagepack.roads.recut import plan_bundle
from stagepack_loaders.distributed.process_memory import estimate_memory

WIDTH = 64
MATRIX = WIDTH * WIDTH * 4


class Chain(nn.Module):
    """Twelve equal layers, of which the first, the third and the last share a weight; the first value is used by the last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(12))
        self.layers[2].weight = self.layers[11].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x).relu()
        for layer in self.layers[1:-1]:
            x = layer(x).relu()
        return self.layers[-1](x + first)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A stage for each layer."""
    out = tmp_path_factory.mktemp("chain") / "chain.stagepack"
    return stagepack.export(
        Chain(), (torch.ones(32, WIDTH),), out=out, split_at=[f"layers.{number}" for number in range(1, 12)]
    )


def named_devices(*names: str, **fields: Any) -> list[TargetDevice]:
    return [TargetDevice(name=name, **fields) for name in names]


def place_chain(chain: Bundle, devices: list[TargetDevice], **options: Any) -> Placement:
    return place(chain.entry_point, devices, files=chain.files.values(), **options)


def test_equal_devices_get_equal_shares(chain: Bundle) -> None:
    placement = place_chain(chain, named_devices("cuda:0", "cuda:1", "cuda:2"))
    # The last one receives two values.
    assert placement.stages_per_device == (4, 5, 3)
    assert [part.stages for part in placement.parts] == [range(4), range(4, 9), range(9, 12)]
    assert placement.interval == placement.bottleneck.time == max(part.time for part in placement.parts)
    assert placement.call_time == sum(part.time for part in placement.parts)
    assert str(placement).startswith("stages 0 to 3 on cuda:0, stages 4 to 8 on cuda:1, stages 9 to 11 on cuda:2; ")


def test_a_shared_weight_and_what_arrives_count_once_in_a_part(chain: Bundle) -> None:
    plan = chain.entry_point.plan
    assert plan is not None
    whole, *_ = place_chain(chain, named_devices("cpu")).parts
    assert 10 * MATRIX <= whole.weight_bytes < 10 * MATRIX + 1000  # with the header of the shared file
    activations = max(stage.memory - stage.weight_bytes for stage in plan.stages)
    assert whole.memory == whole.weight_bytes + activations + 32 * WIDTH * 4
    first, last = place_chain(chain, named_devices("a", "b"), stages_per_device=[3, 9]).parts
    assert 2 * MATRIX <= first.weight_bytes < 2 * MATRIX + 1000
    assert 9 * MATRIX <= last.weight_bytes < 9 * MATRIX + 1000
    # The value of the first stage goes to the last one, too.
    assert last.receiving == 2 * LinkCosts().sending_time(32 * WIDTH * 4)


class Tied(nn.Module):
    """Layers of which some share weights, biases, or one of two further weights, as drawn."""

    def __init__(self, draw: random.Random, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.scale, self.table = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width, width))
        for _ in range(draw.randint(0, 3)):
            first, second = draw.sample(range(count), 2)
            weight_name = draw.choice(["weight", "bias"])
            setattr(self.layers[first], weight_name, getattr(self.layers[second], weight_name))
        self.uses = [draw.choice(["", "", "scale", "table", "both"]) for _ in range(count)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, use in zip(self.layers, self.uses, strict=True):
            x = layer(x).relu()
            x = x * self.scale if use in ("scale", "both") else x
            x = x @ self.table if use in ("table", "both") else x
        return x


@pytest.mark.parametrize("seed", range(6))
def test_weights_that_stages_share_count_once_in_each_part(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    count, width = draw.randint(3, 7), draw.choice([1, 4, 64])
    splits = [f"layers.{number}" for number in range(1, count)]
    bundle = stagepack.export(Tied(draw, count, width), (torch.ones(2, width),), out=tmp_path / "m", split_at=splits)
    stored = [bundle.tensors(number, bundle.graph(number)) for number in range(count)]
    header_bytes = sum(file.size for file in bundle.files.values() if file.name.endswith(".safetensors")) - sum(
        {name: tensor.end - tensor.start for tensors in stored for name, (_, tensor) in tensors.items()}.values()
    )
    for start, end in itertools.combinations(range(count + 1), 2):
        counts = [start, end - start, count - end]
        parts = place_chain(bundle, named_devices("a", "b", "c"), stages_per_device=counts).parts
        part = next(part for part in parts if part.stages == range(start, end))
        sizes = {
            name: tensor.end - tensor.start for number in part.stages for name, (_, tensor) in stored[number].items()
        }
        allowed = header_bytes * (end - start - 1)
        assert sum(sizes.values()) <= part.weight_bytes <= sum(sizes.values()) + allowed
        joined = join_bundle(bundle, [count for count in counts if count])
        assert joined.stages[parts.index(part)].weight_bytes == part.weight_bytes
        assert (
            estimate_memory(bundle, [int(number in part.stages) for number in range(count)], 1).weights
            == part.weight_bytes
        )


def test_a_faster_device_has_more_and_one_that_does_not_help_none(chain: Bundle) -> None:
    fast, slow = TargetDevice(name="cuda:0", speed=2.0), TargetDevice(name="cpu", speed=1e-3)
    placement = place_chain(chain, [fast, TargetDevice(name="cuda:1"), slow])
    assert placement.stages_per_device == (9, 3, 0)
    [left_out] = placement.left_out
    assert left_out.device is slow
    assert re.fullmatch(r"each stage takes it .* or more, longer than the slowest part takes", left_out.reason)
    assert "; not used: cpu (each stage takes it" in str(placement)


def test_a_device_without_enough_memory_is_left_out_by_name(chain: Bundle) -> None:
    placement = place_chain(chain, [TargetDevice(name="tiny", memory="10kB"), TargetDevice(name="cpu")])
    assert placement.stages_per_device == (0, 12)
    assert placement.left_out[0].reason.startswith("no stage fits: the smallest needs ")
    more = place_chain(chain, named_devices(*map(str, range(14))))
    assert {left_out.reason for left_out in more.left_out} <= {
        "each stage has a device of its own without it",
        "the slowest part would be less than 1 % faster with it",
    }


def test_every_part_fits_into_the_memory_of_its_device(chain: Bundle) -> None:
    devices = [TargetDevice(name=str(number), memory=(3 + number) * MATRIX + 70_000) for number in range(4)]
    placement = place_chain(chain, devices)
    assert all(part.memory <= (part.device.memory_limit or 0) for part in placement.parts)


def test_one_call_at_a_time_stays_on_one_device(chain: Bundle) -> None:
    devices = named_devices("cuda:0", "cuda:1")
    assert place_chain(chain, devices, pipelined=False).stages_per_device in [(12, 0), (0, 12)]
    assert place_chain(chain, devices).stages_per_device == (7, 5)


def test_a_slow_link_between_hosts_is_avoided(chain: Bundle) -> None:
    devices = [TargetDevice(name="cuda:0", host="a"), TargetDevice(name="cuda:0", host="b")]
    name, slow = parse_link("host=1MB/s,rtt=10ms")
    assert place_chain(chain, devices, links={name: slow}).stages_per_device == (12, 0)
    name, fast = parse_link("host=1TB/s,rtt=0ms")
    assert place_chain(chain, devices, links={name: fast}).stages_per_device == (5, 7)
    # Between the devices of one host the other link counts.
    near = [TargetDevice(name="cuda:0", host="a"), TargetDevice(name="cuda:1", host="a")]
    assert place_chain(chain, near, links={name: slow}).stages_per_device == (7, 5)


def test_no_fit_says_which_part_lacks_how_much(chain: Bundle) -> None:
    devices = [TargetDevice(name="cuda:0", memory=4 * MATRIX), TargetDevice(name="cpu", memory=4 * MATRIX)]
    with pytest.raises(
        DeviceError, match=r"no placement fits: in the nearest one, stages \d to \d+ need .* too little"
    ):
        place_chain(chain, devices)
    with pytest.raises(DeviceError, match=r"memory: stages 0 to 11 need .* and cuda:0 has 65.5 kB, .* or add a device"):
        place_chain(chain, devices, stages_per_device=[12, 0])
    with pytest.raises(DeviceError, match=r"stage 0 needs .* or cut the bundle into more stages"):
        place_chain(chain, [TargetDevice(name="a", memory=1), TargetDevice(name="b")], stages_per_device=[1, 11])


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([6, 5], "expected numbers with the sum 12, the number of stages, found .* with the sum 11"),
        ([6, 6, 0], "expected 2 numbers, one for each device, found 3"),
        ([13, -1], "expected numbers of stages from 0 up"),
        ([6.0, 6.0], "expected numbers of stages from 0 up"),
        ([True, 11], "expected numbers of stages from 0 up"),
        ("66", "expected numbers of stages from 0 up"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(counts: Any, message: str, chain: Bundle) -> None:
    with pytest.raises(OptionError, match=message):
        place_chain(chain, named_devices("a", "b"), stages_per_device=counts)


def test_a_placement_by_hand_is_kept_and_a_better_one_named(chain: Bundle) -> None:
    devices = named_devices("a", "b", "c")
    placement = place_chain(chain, devices, stages_per_device=[9, 0, 3])
    assert placement.stages_per_device == (9, 0, 3)
    assert [(left_out.device.name, left_out.reason) for left_out in placement.left_out] == [
        ("b", "stages_per_device gives it none")
    ]
    changes = {change.change: change for change in improvements(chain.entry_point, devices, placement)}
    assert changes["the placement 4,5,3"].interval < placement.interval
    assert changes["a twice as fast"].interval < changes["the placement 4,5,3"].interval
    assert "twice the memory on each device" not in changes


def test_what_better_devices_give_is_what_they_would_take(chain: Bundle) -> None:
    devices = [TargetDevice(name="a", memory=5 * MATRIX + 60_000), TargetDevice(name="b", speed=0.25)]
    placement = place_chain(chain, devices)
    changes = {
        change.change: change
        for change in improvements(chain.entry_point, devices, placement, files=chain.files.values())
    }
    faster = place_chain(chain, [devices[0], TargetDevice(name="b", speed=0.5)])
    assert changes["b twice as fast"].interval == faster.interval
    larger = place_chain(chain, [dataclasses.replace(devices[0], memory=10 * MATRIX + 120_000), devices[1]])
    assert changes["twice the memory on each device"].interval == larger.interval
    one_more = place_chain(chain, [*devices, devices[1]])
    assert changes["one more b"].interval == one_more.interval


def profile_of(chain: Bundle, seconds: dict[int, float], link: LinkTime | None = None) -> Profile:
    nodes = tuple(NodeTime(node=node, op="", module="", seconds=time) for node, time in seconds.items())
    return Profile(
        model="", bundle="", machine="", torch="", threads=1, runs=1, sizes={}, stages=(), link=link, nodes=nodes
    )


def test_measured_times_of_nodes_are_summed_and_scale_the_others(chain: Bundle) -> None:
    plan = chain.entry_point.plan
    assert plan is not None
    nodes = [list(run_members(stage.nodes)) for stage in plan.stages]
    measured = {node: 1e-3 * (stage + 1) for stage, members in enumerate(nodes) for node in members}
    times = stage_times(chain.entry_point, TargetDevice(name="cpu", profile=profile_of(chain, measured), speed=2.0))
    assert times == pytest.approx([len(members) * 1e9 * (stage + 1) / 2 for stage, members in enumerate(nodes)])
    # Only the first stage is measured: the others take as much longer than their estimates as it does.
    first = {node: 1e-3 for node in nodes[0]}
    times = stage_times(chain.entry_point, TargetDevice(name="cpu", profile=profile_of(chain, first)))
    scale = len(nodes[0]) * 1e9 / plan.stages[0].picoseconds
    assert times == pytest.approx([stage.picoseconds * scale for stage in plan.stages])
    # Half of a stage is measured.
    times = stage_times(chain.entry_point, TargetDevice(name="cpu", profile=profile_of(chain, {nodes[0][0]: 1e-3})))
    assert times[0] == pytest.approx(len(nodes[0]) * 1e9)


@pytest.mark.parametrize(("seconds", "message"), [({999: 1.0}, "found one of node 999"), ({}, "at least one node")])
def test_times_of_another_model_are_refused(seconds: dict[int, float], message: str, chain: Bundle) -> None:
    with pytest.raises(CutError, match=message):
        place_chain(chain, [TargetDevice(name="cpu", profile=profile_of(chain, seconds))])


def test_a_measured_link_is_that_of_its_device(chain: Bundle) -> None:
    link = LinkTime(seconds_per_value=1.0, seconds_per_byte=0.0)
    slow = TargetDevice(name="cpu", profile=profile_of(chain, {0: 1e-6}, link))
    placement = place_chain(chain, [slow, slow], stages_per_device=[6, 6])
    assert [part.receiving for part in placement.parts] == [10**12, 2 * 10**12]
    given = place_chain(chain, [slow, slow], stages_per_device=[6, 6], links={"device": Link(bandwidth=1e9, rtt=0.0)})
    assert given.parts[0].receiving == 32 * WIDTH * 4 * 1000


def test_a_data_sheet_gives_speed_and_memory(chain: Bundle) -> None:
    h100, t4 = (TargetDevice(name=name, profile=DEVICE_PROFILES[name]) for name in ("h100", "t4"))
    assert (h100.memory_limit, t4.memory_limit) == (80 * 10**9, 16 * 10**9)
    assert sum(stage_times(chain.entry_point, h100)) < sum(stage_times(chain.entry_point, t4))
    assert TargetDevice(name="a", memory="1GB", profile=DEVICE_PROFILES["t4"]).memory_limit == 10**9


@pytest.mark.parametrize("name", ["t4", "h100", "a10"])
def test_times_of_a_data_sheet_are_near_those_of_the_nodes(name: str, chain: Bundle) -> None:
    by_nodes = plan_bundle(chain, CutOptions(plan=chain.entry_point.plan, profile=name)).profiled_plan
    times = stage_times(chain.entry_point, TargetDevice(name=name, profile=DEVICE_PROFILES[name]))
    assert times == pytest.approx([stage.picoseconds for stage in by_nodes.stages], rel=0.1)


def test_a_bundle_without_a_plan_is_placed_by_its_weights_and_operations(chain: Bundle) -> None:
    without = msgspec.structs.replace(chain.entry_point, plan=None)
    assert place(without, named_devices("a", "b"), files=chain.files.values()).stages_per_device == (7, 5)


@pytest.mark.parametrize(
    ("text", "bandwidth", "rtt"),
    [
        ("host=25GB/s,rtt=0.1ms", 25e9, 1e-4),
        ("host=900 MB/s", 900e6, 1e-4),
        ("device=1GiB/s,rtt=5us", 2**30, 5e-6),
        ("device=100/s,rtt=0s", 100, 0.0),
        ("device=1TB/s,rtt=20µs", 1e12, 2e-5),
    ],
)
def test_links_are_read(text: str, bandwidth: float, rtt: float) -> None:
    name, link = parse_link(text)
    assert name == text.partition("=")[0]
    assert link.bandwidth == bandwidth
    assert link.rtt == pytest.approx(rtt)
    assert parse_link(f"{name}={link_text(link.costs)}")[1].rtt == pytest.approx(rtt)


@pytest.mark.parametrize(
    "text",
    [
        "", "host", "host=", "host=25GB", "25GB/s", "bus=25GB/s", "host=25GB/s,", "host=25GB/s,rtt=", "host=-1GB/s",
        "host=25GB/s,rtt=1", "host=25GB/s,rtt=-1ms", "host=25GB/s,rtt=1ms,rtt=2ms", "host=0/s", "host=inf/s",
        "host=25GB/s,rtt=1h", "host=25GB/s,latency=1ms", "host=25Gbit/s", "host =25GB/s", "host=9999999TB/s",
        "host=25GB/s,rtt=9999s", "host=25GB/s\n", "host=" + "9" * 400 + ".5GB/s", "host=1GB/s,rtt=" + "9" * 400 + "s",
    ],
)  # fmt: skip
def test_other_texts_are_no_links(text: str) -> None:
    with pytest.raises(OptionError, match=r"^link"):
        parse_link(text)


@pytest.mark.parametrize(
    "fields", [{"name": ""}, {"speed": 0.0}, {"speed": float("nan")}, {"memory": "much"}, {"memory": -1}]
)
def test_devices_with_impossible_numbers_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        TargetDevice(**{"name": "cpu"} | fields)


@pytest.mark.parametrize("count", [0, 257])
def test_numbers_of_devices_out_of_range_are_refused(count: int, chain: Bundle) -> None:
    with pytest.raises(OptionError, match="expected 1 to 256 devices"):
        place_chain(chain, named_devices(*["cpu"] * count))


def test_unknown_names_of_links_are_refused(chain: Bundle, tmp_path: Path) -> None:
    links: Any
    for links in ({"bus": Link(bandwidth=1e9, rtt=0.0)}, {"host": "25GB/s"}):
        with pytest.raises(OptionError, match="expected a Link for device or host"):
            place_chain(chain, named_devices("a"), links=links)
