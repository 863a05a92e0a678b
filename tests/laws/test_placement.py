"""Placement of stages: as good as the best of all groupings."""

import itertools
import math
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from stagepack.partition.costs import LinkCosts
from stagepack.partition.grouping import group_stages, group_with_least_excess
from stagepack.partition.part_costs import DeviceCosts, StageCosts, part_times
from stagepack.partition.solver import SharedCost

CASES = 300
# As promised: 2 %. A device that makes the slowest part less than 1 % faster is left out.
WORST_RATIO = 1.0101


def draw_stages(draw: random.Random, count: int, extra_values: int) -> StageCosts:
    """A chain with skips, and weights that several stages use."""

    def users(producer: int, most: int) -> list[int]:
        later = range(producer + 1, count)
        return sorted(draw.sample(later, draw.randint(1, min(most, len(later)))))

    chain = [SharedCost(cost=draw.randint(0, 50), users=[item], producer=item - 1) for item in range(count)]
    producers = [draw.randint(-1, count - 2) for _ in range(extra_values)] if count > 1 else []
    skips = [SharedCost(cost=draw.randint(0, 50), users=users(it, 3), producer=it) for it in producers]
    shared = [SharedCost(cost=draw.randint(0, 60), users=users(-1, 4)) for _ in range(draw.randint(0, 3))]
    own = [SharedCost(cost=draw.randint(0, 60), users=[item]) for item in range(count)]
    return StageCosts(
        values=tuple(draw.sample(chain, draw.randint(0, count)) + skips),
        weights=tuple(own + shared),
        working_bytes=tuple(draw.randint(0, 30) for _ in range(count)),
        caller_host=draw.choice("ab"),
    )


def draw_devices(draw: random.Random, stage_count: int, hosts: str) -> list[DeviceCosts]:
    """Devices of unequal memory, speed and links; some are faster at some stages only."""
    base = [draw.randint(1, 50) for _ in range(stage_count)]
    devices = []
    for host in hosts:
        speed = draw.choice([0.2, 0.5, 1.0, 1.0, 3.0])
        times = [time * draw.choice([0.5, 1.0, 2.0]) / speed if draw.random() < 0.3 else time / speed for time in base]
        near = LinkCosts(per_value=draw.choice([0, 1, 5]), per_byte=draw.choice([0.01, 0.1, 0.5]))
        far = LinkCosts(per_value=draw.choice([0, 5, 30]), per_byte=draw.choice([0.01, 0.5, 2.0]))
        memory = draw.choice([math.inf, math.inf, *[float(draw.randint(20, 60 + 45 * stage_count)) for _ in range(3)]])
        devices.append(DeviceCosts(times=tuple(times), memory=memory, host=host, near=near, far=far))
    return devices


def draw_hosts(draw: random.Random, device_count: int, *, apart: bool) -> str:
    hosts = [draw.choice("abc") for _ in range(device_count)]
    return "".join(hosts if apart else sorted(hosts))


def groupings(stage_count: int, device_count: int) -> Iterator[list[int]]:
    """All numbers of stages of devices in order."""
    for bounds in itertools.combinations_with_replacement(range(stage_count + 1), device_count - 1):
        yield [end - start for start, end in itertools.pairwise((0, *bounds, stage_count))]


def excess(stages: StageCosts, devices: list[DeviceCosts], counts: list[int]) -> float:
    """The bytes that the part lacks which lacks most; 0 if all fit."""
    bounds = [0, *itertools.accumulate(counts)]
    return max(
        max(0.0, stages.memory_bytes(start, end) - device.memory) if end > start else 0.0
        for device, (start, end) in zip(devices, itertools.pairwise(bounds), strict=True)
    )


def slowest(stages: StageCosts, devices: list[DeviceCosts], counts: list[int]) -> float:
    return max(part.total for part in part_times(stages, devices, counts))


def one_call(stages: StageCosts, devices: list[DeviceCosts], counts: list[int]) -> float:
    return sum(part.total for part in part_times(stages, devices, counts))


def check_case(draw: random.Random, *, apart: bool = False) -> tuple[float, float] | None:
    """Compare a drawn case with all groupings.

    Return how the slowest part compares with the fastest one, and the time of one call with the shortest one; None where nothing fits.
    """
    stage_count, device_count = draw.randint(1, 8), draw.randint(1, 4)
    stages = draw_stages(draw, stage_count, draw.randint(0, 4))
    devices = draw_devices(draw, stage_count, draw_hosts(draw, device_count, apart=apart))
    every = list(groupings(stage_count, device_count))
    fitting = [counts for counts in every if excess(stages, devices, counts) == 0]
    found = group_stages(stages, devices)
    shortest = group_stages(stages, devices, pipelined=False)
    if not fitting:
        assert found is shortest is None
        nearest = group_with_least_excess(stages, devices)
        assert excess(stages, devices, nearest) == min(excess(stages, devices, counts) for counts in every)
        return None
    assert found in fitting
    assert shortest in fitting
    best = min(slowest(stages, devices, counts) for counts in fitting)
    least = min(one_call(stages, devices, counts) for counts in fitting)
    as_fast = [counts for counts in fitting if slowest(stages, devices, counts) <= best * (1 + 1e-12)]
    assert apart or device_count_of(found) <= min(map(device_count_of, as_fast))
    return slowest(stages, devices, found) / best, one_call(stages, devices, shortest) / least


def device_count_of(counts: list[int]) -> int:
    return sum(map(bool, counts))


def test_groups_are_as_fast_as_the_best_of_all_and_fit_whenever_one_does() -> None:
    """Measured: the worst of 300 is 1.0086; 64 fit nowhere."""
    draw = random.Random(59)  # noqa: S311 - not for secrets
    ratios = [check_case(draw) for _ in range(CASES)]
    found = [ratio for ratio in ratios if ratio is not None]
    assert 20 < len(ratios) - len(found) < 150
    assert max(ratio for ratio, _ in found) <= WORST_RATIO
    assert max(ratio for _, ratio in found) <= 1 + 1e-9


def test_devices_of_one_host_that_stand_apart_fit_whenever_a_grouping_does() -> None:
    """Measured: 0 to 2 of 300 are more than 2 % slower than the best, where a value passes a host in between."""
    draw = random.Random(60)  # noqa: S311 - not for secrets
    ratios = [check_case(draw, apart=True) for _ in range(CASES)]
    assert sum(ratio is not None and ratio[0] > 1.02 for ratio in ratios) <= CASES // 50


@pytest.mark.parametrize("hosts", ["a" * 16, "aaaabbbbccccdddd", "abcdefghijklmnop"])
def test_three_hundred_stages_over_sixteen_unequal_devices_take_a_second_at_the_most(hosts: str) -> None:
    """Measured: 0.08, 0.14 and 0.13 s of processor time; 0.4 s where links take longer than stages."""
    draw = random.Random(1)  # noqa: S311 - not for secrets
    stages = draw_stages(draw, 300, 60)
    devices = draw_devices(draw, 300, hosts)
    started = time.process_time()
    counts = group_stages(stages, devices)
    assert time.process_time() - started < 1
    assert counts is not None
    assert excess(stages, devices, counts) == 0


def test_more_stages_than_are_compared_one_by_one_are_grouped_in_units() -> None:
    draw = random.Random(2)  # noqa: S311 - not for secrets
    stages = draw_stages(draw, 1300, 100)
    devices = [replace(device, memory=math.inf) for device in draw_devices(draw, 1300, "aabb")]
    counts = group_stages(stages, devices)
    assert counts is not None
    assert sum(counts) == 1300
    work = [sum(device.times) for device in devices]
    assert slowest(stages, devices, counts) < 1.5 * min(work)
