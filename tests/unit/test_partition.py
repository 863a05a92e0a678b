"""Splitting a row of items: as good as the best of all splits."""

import itertools
import math
import random
import time
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from stagepack.partition.cost_sequence import CostSequence, SharedCost, part_cost
from stagepack.partition.solver import split_sequence, split_with_least_excess


@st.composite
def rows(draw: st.DrawFn) -> CostSequence:
    count = draw(st.integers(1, 9))
    uses = st.lists(st.integers(0, count - 1), min_size=1, max_size=4, unique=True).map(sorted)
    sent = []
    for _ in range(draw(st.integers(0, 8))):
        maker = draw(st.integers(-1, count - 2))
        later = [use for use in draw(uses) if use > maker]
        if later:
            sent.append(SharedCost(cost=draw(st.integers(0, 50)), users=tuple(later), producer=maker))
    held = [SharedCost(cost=draw(st.integers(0, 50)), users=tuple(draw(uses))) for _ in range(draw(st.integers(0, 6)))]
    return CostSequence(
        times=draw(st.lists(st.integers(1, 50), min_size=count, max_size=count)),
        transfers=sent,
        weights=held,
        working_bytes=draw(st.lists(st.integers(0, 30), min_size=count, max_size=count)),
        split_positions=sorted(draw(st.sets(st.integers(1, max(1, count - 1)))) if count > 1 else []),
    )


def splits(row: CostSequence, parts: int) -> list[tuple[int, ...]]:
    """All splits into parts that are not empty."""
    return list(itertools.combinations(row.split_positions, parts - 1))


def slowest(row: CostSequence, found: Sequence[int], speeds: Sequence[float], limits: Sequence[int | None]) -> float:
    """The time of the slowest part; infinity when one does not fit."""
    ends = [0, *found, len(row.times)]
    parts = [part_cost(row, start, end) for start, end in itertools.pairwise(ends)]
    fits = all(limit is None or part.memory_bytes <= limit for part, limit in zip(parts, limits, strict=True))
    return max(part.time_at(speed) for part, speed in zip(parts, speeds, strict=True)) if fits else math.inf


@settings(max_examples=400, deadline=None, derandomize=True)
@given(rows(), st.data())
def test_split_is_the_best_of_all(row: CostSequence, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, min(4, len(row.split_positions) + 1)))
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=parts, max_size=parts))
    limits = data.draw(st.lists(st.none() | st.integers(0, 120), min_size=parts, max_size=parts))
    best = min(slowest(row, found, speeds, limits) for found in splits(row, parts))
    found = split_sequence(row, speeds, limits)
    assert (found is None) == (best == math.inf)
    if found is not None:
        assert tuple(found) in splits(row, parts)
        assert slowest(row, found, speeds, limits) == best

    def excess(found: Sequence[int]) -> int:
        ends = [0, *found, len(row.times)]
        memory = [part_cost(row, start, end).memory_bytes for start, end in itertools.pairwise(ends)]
        return max(max(0, size - limit) for size, limit in zip(memory, limits, strict=True) if limit is not None)

    if found is None:
        assert excess(split_with_least_excess(row, limits)) == min(map(excess, splits(row, parts)))


def test_five_thousand_items_in_sixteen_parts_take_seconds_at_the_most() -> None:
    """Measured: 0.5 s of processor time."""
    draw = random.Random(0)  # noqa: S311 - not for secrets
    count = 5000
    row = CostSequence(
        times=[draw.randint(1, 10**9) for _ in range(count)],
        transfers=[
            SharedCost(
                cost=draw.randint(5 * 10**6, 10**8),
                users=(min(count - 1, maker + draw.choice([1, 1, 2, 40])),),
                producer=maker,
            )
            for maker in range(count - 1)
        ],
        weights=[SharedCost(cost=draw.randint(1, 10**8), users=(item,)) for item in range(0, count, 3)],
        working_bytes=[draw.randint(1, 10**7) for _ in range(count)],
        split_positions=range(1, count),
    )
    started = time.process_time()
    assert split_sequence(row, [1.0, 2.0] * 8, [10**11] * 16) is not None
    assert time.process_time() - started < 8
