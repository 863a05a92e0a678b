"""`stagepack plan --device` and `stagepack.load` place the stages of a bundle alike, and state the same memory."""

import itertools
import json
import random
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import StagepackError
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.membership import GroupOptions
from stagepack_loaders.distributed.process_launcher import over_processes
from stagepack_loaders.options import LoadOptions, PlacementOptions
from stagepack_loaders.placement import current_placement, place_bundle
from tests.hostile.attack import run

_DRAWS = 120
_FLAGS = {"memory": "--memory", "speeds": "--speed", "profiles": "--profile", "links": "--link"}
_LINKS = ("device=1GB/s,rtt=1us", "device=64GB/s", "host=1GB/s,rtt=0.2ms")


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [64, 256, 64, 128, 512, 64, 64, 64]
        self.layers = torch.nn.ModuleList(itertools.starmap(torch.nn.Linear, itertools.pairwise(widths)))
        self.layers[5].weight = self.layers[6].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("tower") / "tower.stagepack"
    splits = [f"layers.{number}" for number in range(1, 7)]
    return stagepack.export(Tower(), (torch.ones(8, 64),), out=out, split_at=splits)


def drawn_options(draw: random.Random) -> tuple[list[str], int | None, dict[str, list[Any]]]:
    """Devices, a number of processes, and what is said of the devices."""
    process_count = draw.choice([None, None, 1, 2, 3, 4, 9])
    devices = draw.choice([["auto"], ["cpu"], ["cpu"] * (process_count or draw.randint(1, 5))])
    count = draw.choice([process_count or len(devices)] * 9 + [2])
    options: dict[str, list[Any]] = {}
    if draw.random() < 0.4:
        options["memory"] = [draw.choice(["1MB", "400kB", "150kB", "2GB"]) for _ in range(count)]
    if draw.random() < 0.3:
        options["speeds"] = [draw.choice([0.5, 1.0, 3.0]) for _ in range(count)]
    if draw.random() < 0.3:
        options["profiles"] = [draw.choice(["t4", "cpu=h100", "l4"])]
    if draw.random() < 0.3:
        options["links"] = [draw.choice(_LINKS)]
    if draw.random() < 0.2:
        ends = sorted(draw.randint(0, 7) for _ in range(max(0, count - 1)))
        options["stages_per_device"] = [end - start for start, end in itertools.pairwise((0, *ends, 7))]
    return devices, process_count, options


def planned(bundle: Bundle, devices: list[str], process_count: int | None, options: dict[str, list[Any]]) -> Any:
    """The stages, the memory and the limit of each part by the command, or its error."""
    arguments = [argument for device in devices for argument in ("--device", device)]
    for name, flag in _FLAGS.items():
        arguments += [argument for value in options.get(name, ()) for argument in (flag, str(value))]
    if counts := options.get("stages_per_device"):
        arguments += ["--placement", ",".join(map(str, counts))]
    if process_count is not None:
        arguments += ["--processes", str(process_count)]
    result = run("plan", str(bundle.path), *arguments, "--json")
    if result.exit_code:
        return result.output.partition(": ")[2].partition(f"{bundle.location}: ")[2].strip()
    facts = json.loads(result.stdout)
    return [(part["stages"], part["memory"], part["speed"]) for part in facts["parts"]]


def loaded(bundle: Bundle, devices: list[str], process_count: int | None, options: dict[str, list[Any]]) -> Any:
    """The same of what `load` chooses."""
    load = LoadOptions(devices=devices, placement=PlacementOptions(**options))
    try:
        if process_count is None:
            placed = place_bundle(bundle, load)
        else:
            placed, _ = over_processes(bundle, process_count, GroupOptions(load=load))
    except StagepackError as error:
        return str(error).strip()
    placement = placed.chosen or current_placement(placed.bundle, placed.options.devices)
    if placed.chosen is None and process_count is None and len(devices) == 1:
        return None  # each stage stays a program of its own
    return [([*part.stages], part.memory, part.device.speed) for part in placement.parts]


def test_drawn_options(bundle: Bundle) -> None:
    draw = random.Random(59)  # noqa: S311 - the same draws in each run
    refused = 0
    for _ in range(_DRAWS):
        drawn = drawn_options(draw)
        expected = loaded(bundle, *drawn)
        found = planned(bundle, *drawn)
        if expected is None:
            assert [stages for stages, *_ in found] == [[*range(7)]]
        else:
            assert found == expected, drawn
        refused += isinstance(expected, str)
    assert 0 < refused < _DRAWS / 2
