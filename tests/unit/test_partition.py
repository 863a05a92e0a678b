"""Splitting a row of items: as good as the best of all splits."""

import itertools
import math
import random
import time
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from stagepack.partition.solver import CostSequence, SharedCost, part_cost, split_sequence, split_with_least_excess


@st.composite
def rows(draw: st.DrawFn) -> CostSequence:
    count = draw(st.integers(1, 9))
    uses = st.lists(st.integers(0, count - 1), min_size=1, max_size=4, unique=True).map(sorted)
    transfers = []
    for _ in range(draw(st.integers(0, 8))):
        producer = draw(st.integers(-1, count - 2))
        later = [use for use in draw(uses) if use > producer]
        if later:
            transfers.append(SharedCost(cost=draw(st.integers(0, 50)), users=tuple(later), producer=producer))
    weights = [
        SharedCost(cost=draw(st.integers(0, 50)), users=tuple(draw(uses))) for _ in range(draw(st.integers(0, 6)))
    ]
    return CostSequence(
        times=draw(st.lists(st.integers(1, 50), min_size=count, max_size=count)),
        transfers=transfers,
        weights=weights,
        working_bytes=draw(st.lists(st.integers(0, 30), min_size=count, max_size=count)),
        split_positions=sorted(draw(st.sets(st.integers(1, max(1, count - 1)))) if count > 1 else []),
    )


def splits(sequence: CostSequence, parts: int) -> list[tuple[int, ...]]:
    """All splits into parts that are not empty."""
    return list(itertools.combinations(sequence.split_positions, parts - 1))


def slowest(
    sequence: CostSequence, starts: Sequence[int], speeds: Sequence[float], limits: Sequence[int | None]
) -> float:
    """The time of the slowest part; infinity when one does not fit."""
    ends = [0, *starts, len(sequence.times)]
    parts = [part_cost(sequence, start, end) for start, end in itertools.pairwise(ends)]
    fits = all(limit is None or part.memory_bytes <= limit for part, limit in zip(parts, limits, strict=True))
    return max(part.time_at(speed) for part, speed in zip(parts, speeds, strict=True)) if fits else math.inf


@settings(max_examples=400, deadline=None, derandomize=True)
@given(rows(), st.data())
def test_split_is_the_best_of_all(sequence: CostSequence, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, min(4, len(sequence.split_positions) + 1)))
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=parts, max_size=parts))
    limits = data.draw(st.lists(st.none() | st.integers(0, 120), min_size=parts, max_size=parts))
    best = min(slowest(sequence, starts, speeds, limits) for starts in splits(sequence, parts))
    starts = split_sequence(sequence, speeds, limits)
    assert (starts is None) == (best == math.inf)
    if starts is not None:
        assert tuple(starts) in splits(sequence, parts)
        assert slowest(sequence, starts, speeds, limits) == best

    def excess(starts: Sequence[int]) -> int:
        ends = [0, *starts, len(sequence.times)]
        memory = [part_cost(sequence, start, end).memory_bytes for start, end in itertools.pairwise(ends)]
        return max(max(0, size - limit) for size, limit in zip(memory, limits, strict=True) if limit is not None)

    if starts is None:
        assert excess(split_with_least_excess(sequence, limits)) == min(map(excess, splits(sequence, parts)))


def test_five_thousand_items_in_sixteen_parts_take_seconds_at_the_most() -> None:
    """Measured: 0.5 s of processor time."""
    draw = random.Random(0)  # noqa: S311 - not for secrets
    count = 5000
    sequence = CostSequence(
        times=[draw.randint(1, 10**9) for _ in range(count)],
        transfers=[
            SharedCost(
                cost=draw.randint(5 * 10**6, 10**8),
                users=(min(count - 1, producer + draw.choice([1, 1, 2, 40])),),
                producer=producer,
            )
            for producer in range(count - 1)
        ],
        weights=[SharedCost(cost=draw.randint(1, 10**8), users=(item,)) for item in range(0, count, 3)],
        working_bytes=[draw.randint(1, 10**7) for _ in range(count)],
        split_positions=range(1, count),
    )
    started = time.process_time()
    assert split_sequence(sequence, [1.0, 2.0] * 8, [10**11] * 16) is not None
    assert time.process_time() - started < 8
