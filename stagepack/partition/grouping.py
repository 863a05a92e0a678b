"""Group consecutive stages for devices in order, so that the slowest part is as fast as possible; a device may get no stages.

Exact by dynamic programming over the first stage of each part. The time of receiving a value depends on where its producer runs. Devices
of one host stand together, so that for a part it is enough to know where the parts of its host begin: for hosts after the first one that
have several devices, each beginning is tried. Devices of one host that stand apart count as two hosts while parts are compared; the
groups that come out are computed with the links that they have.

A cost of parts is a matrix ``[first stage, number of stages]``. Times are in picoseconds, memory in bytes.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from numpy.typing import NDArray

from stagepack.partition.part_costs import DeviceCosts, StageCosts, part_times
from stagepack.partition.solver import SharedCost

# A device whose use makes the slowest part less than a hundredth faster is left out.
_LEAST_GAIN = 1.01
# Rounding must leave out no group that is as good as the bound.
_ROUNDING = 1 + 1e-9
_Floats = NDArray[np.float64]
_Widths = NDArray[np.int64]
# With more stages, neighbours are joined to as many units: 512 stages over 16 devices of 4 hosts take seconds.
_MOST_UNITS = 512


def group_stages(stages: StageCosts, devices: Sequence[DeviceCosts], *, pipelined: bool = True) -> list[int] | None:
    """Choose the number of stages of each device; None if no grouping fits into the memory of the devices.

    The slowest part is as fast as possible, or within a hundredth of that on fewer devices; then the sum of the squares of the times is
    least. For calls that come one at a time, `pipelined` is false: the sum of the times is least.
    """
    if len(stages.working_bytes) > _MOST_UNITS:
        return _group_units(stages, devices, pipelined=pipelined)

    def rate(counts: Sequence[int]) -> float:
        times = [time.total for time in part_times(stages, devices, counts)]
        return max(times) if pipelined else sum(times)

    sums = _PartSums(stages)
    combine = np.maximum if pipelined else np.add
    candidates = [
        counts
        for used in (range(len(devices)), *_hosts_that_stand_together(devices))
        for counts in _fastest_groups(sums, devices, used, combine)
    ]
    if not candidates:
        return None
    counts = min(candidates, key=rate)
    if not pipelined:
        return counts
    longest = rate(counts) * _LEAST_GAIN
    fewest = _Search(sums, devices, longest=longest).best(np.add, _fewest_parts(longest)) or counts
    has_fewer = np.count_nonzero(fewest) < np.count_nonzero(counts)
    used = [number for number, count in enumerate(fewest if has_fewer else counts) if count]
    search = _Search(sums, [devices[number] for number in used], longest=longest)
    fastest = _spread(search.best(combine) or [], used, len(devices)) if has_fewer else counts
    even = _spread(search.best(np.add, _squares(rate(fastest))) or [], used, len(devices))
    # Devices of one host that stand apart count as two hosts in a search, so that it may miss what was found.
    return next(found for found in (even, fastest, counts) if sum(found) == sums.size and rate(found) <= longest)


def group_with_least_excess(stages: StageCosts, devices: Sequence[DeviceCosts]) -> list[int]:
    """Find the grouping whose part that exceeds its memory most exceeds it by as few bytes as possible."""
    counts = _Search(_PartSums(stages), devices, hosts=[0] * len(devices), of_excess=True).best(np.maximum)
    assert counts is not None  # every grouping has a finite excess
    return counts


def _fastest_groups(
    sums: "_PartSums", devices: Sequence[DeviceCosts], used: Sequence[int], combine: "_Combine"
) -> Iterator[list[int]]:
    """Yield groupings for some of the devices, of which one is the fastest; none if no grouping fits."""
    used_devices = [devices[number] for number in used]
    # Any grouping that fits bounds how long a part of the best one can be.
    fitting = _Search(sums, used_devices, hosts=used).best(combine) if used else None
    if fitting is not None:
        yield _spread(fitting, used, len(devices))
        times = [time.total for time in part_times(sums.stages, used_devices, fitting)]
        search = _Search(sums, used_devices, longest=max(times) if combine is np.maximum else sum(times))
        yield _spread(search.best(combine) or fitting, used, len(devices))


def _hosts_that_stand_together(devices: Sequence[DeviceCosts]) -> Iterator[list[int]]:
    """Yield the devices without each host, and of each host, if devices of one host stand apart: the others may then stand together."""
    hosts = [device.host for device in devices]
    if len(list(itertools.groupby(hosts))) > len(set(hosts)):
        for chosen in dict.fromkeys(hosts):
            yield [number for number, host in enumerate(hosts) if host != chosen]
            yield [number for number, host in enumerate(hosts) if host == chosen]


def _spread(counts: Sequence[int], used: Sequence[int], device_count: int) -> list[int]:
    """The counts of some devices, among all devices."""
    spread = [0] * device_count
    for number, count in zip(used, counts, strict=False):  # none, where no grouping was found
        spread[number] = count
    return spread


def _group_units(stages: StageCosts, devices: Sequence[DeviceCosts], *, pipelined: bool) -> list[int] | None:
    """Group runs of stages of about equal number."""
    size = len(stages.working_bytes)
    starts = [unit * size // _MOST_UNITS for unit in range(_MOST_UNITS)]
    unit_of_stage = np.searchsorted(starts, np.arange(size), side="right") - 1
    ends = [*starts[1:], size]

    def joined(cost: SharedCost) -> SharedCost:
        users = sorted({int(unit_of_stage[user]) for user in cost.users})
        return replace(cost, users=users, producer=int(unit_of_stage[cost.producer]) if cost.producer >= 0 else -1)

    units = replace(
        stages,
        values=tuple(map(joined, stages.values)),
        weights=tuple(map(joined, stages.weights)),
        working_bytes=tuple(max(stages.working_bytes[start:end]) for start, end in zip(starts, ends, strict=True)),
    )
    unit_devices = [
        replace(device, times=tuple(sum(device.times[start:end]) for start, end in zip(starts, ends, strict=True)))
        for device in devices
    ]
    counts = group_stages(units, unit_devices, pipelined=pipelined)
    if counts is None:
        return None
    unit_bounds = [*starts, size]
    bounds = [unit_bounds[bound] for bound in (0, *itertools.accumulate(counts))]
    return [end - start for start, end in itertools.pairwise(bounds)]


_Combine = Callable[[_Floats, _Floats], _Floats]
_Score = Callable[[_Floats], _Floats]


def _squares(longest: float) -> _Score:
    limit = longest * _ROUNDING
    return lambda times: np.where(times <= limit, (times / limit) ** 2, np.inf)


def _fewest_parts(longest: float) -> _Score:
    """One for each part, and less than one for all squares."""
    return lambda times: np.where(times <= longest, 1.0 + (times / longest) ** 2 / 2**20, np.inf)


class _PartSums:
    """What parts receive and hold, whatever their device."""

    def __init__(self, stages: StageCosts) -> None:
        self.stages = stages
        self.size = len(stages.working_bytes)
        self._values = _NextUses(stages.values)
        self.received_counts, self.received_bytes = self._values.sums(0, self.size + 1, self.size + 1)
        _, weight_bytes = _NextUses(stages.weights).sums(0, self.size + 1, self.size + 1)
        working_bytes = np.array([*stages.working_bytes, *[np.inf] * self.size], dtype=np.float64)
        peaks = np.maximum.accumulate(sliding_window_view(working_bytes, self.size), axis=1)
        # Infinite for parts that end behind the last stage.
        self.memory = weight_bytes + self.received_bytes
        self.memory[:, 1:] += peaks

    def far(
        self, first: int, row_count: int, width: int, *, before: int, without_caller: bool
    ) -> tuple[_Floats, _Floats]:
        """The numbers and bytes of the values from producers before a stage, for parts as of `_NextUses.sums`."""
        return self._values.sums(first, row_count, width, range(0 if without_caller else -1, before))


class _NextUses:
    """Shared costs, by the stage that uses them next."""

    def __init__(self, costs: Iterable[SharedCost]) -> None:
        # For each use: the parts that begin behind the producer and the use before, up to this use, have the cost here.
        uses = [
            (max(cost.producer, last_user), user, cost.producer, cost.cost)
            for cost in costs
            for last_user, user in itertools.pairwise((-1, *cost.users))
        ]
        self._behind, self._users, self._producers, self._bytes = np.array(uses, dtype=np.int64).reshape(-1, 4).T

    def sums(self, first: int, row_count: int, width: int, producers: range | None = None) -> tuple[_Floats, _Floats]:
        """Return the numbers and the bytes of parts that begin at `first` and the stages behind it, with fewer than `width` stages."""
        used = (self._users >= first) & (self._users < first + row_count + width - 2)
        if producers is not None:
            used &= (self._producers >= producers.start) & (self._producers < producers.stop)
        users = self._users[used] - first
        begins = np.maximum(self._behind[used] + 1 - first, 0)
        first_rows, last_rows = np.minimum(begins, row_count), np.minimum(users + 1, row_count)
        at_use = np.zeros((2, row_count + 1, row_count + width))
        for plane, amounts in zip(at_use, (np.ones(len(users)), self._bytes[used].astype(np.float64)), strict=True):
            np.add.at(plane, (first_rows, users), amounts)
            np.add.at(plane, (last_rows, users), -amounts)
        np.cumsum(at_use, axis=1, out=at_use)
        kind_step, row_step, column_step = at_use.strides
        # [kind, begin, number of stages before the use]
        band = as_strided(at_use, (2, row_count, width - 1), (kind_step, row_step + column_step, column_step))
        sums = np.zeros((2, row_count, width))
        np.cumsum(band, axis=2, out=sums[:, :, 1:])
        return sums[0], sums[1]


class _Search:
    """The best grouping among those whose parts compute no longer than a bound."""

    def __init__(
        self,
        sums: _PartSums,
        devices: Sequence[DeviceCosts],
        *,
        longest: float = math.inf,
        hosts: Sequence[object] | None = None,
        of_excess: bool = False,
    ) -> None:
        """Make the costs of parts. `hosts`: in the place of the hosts of the devices; `of_excess`: bytes above the memory, not times."""
        self._sums = sums
        self._devices = devices
        keys = [device.host for device in devices] if hosts is None else hosts
        runs = itertools.groupby(range(len(devices)), key=keys.__getitem__)
        self._runs = [list(run) for _, run in runs]
        self._has_links = not of_excess
        costs_of_kind: dict[object, _Floats] = {}
        self._costs = []
        for device in devices:
            kind = (device.times, device.near, device.memory)
            if kind not in costs_of_kind:
                costs_of_kind[kind] = self._excess(device) if of_excess else self._near_times(device, longest)
            self._costs.append(costs_of_kind[kind])
        self._entries = self._reachable(longest * _ROUNDING)

    def _reachable(self, longest: float) -> list[range]:
        """For each device, the stages at which its part may begin so that no device computes longer than a bound."""
        size = self._sums.size
        if math.isinf(longest):
            return [range(size + 1)] * len(self._devices)
        before = [np.concatenate([[0.0], np.cumsum(device.times)]) for device in self._devices]
        latest, earliest = [0], [size]
        for times in before[:-1]:
            latest.append(int(np.searchsorted(times, times[latest[-1]] + longest, side="right")) - 1)
        for times in reversed(before):
            earliest.append(int(np.searchsorted(times, times[earliest[-1]] - longest, side="left")))
        return [range(first, last + 1) for first, last in zip(earliest[:0:-1], latest, strict=True)]

    def _excess(self, device: DeviceCosts) -> _Floats:
        memory = self._sums.memory
        excess = np.where(np.isinf(memory), np.inf, np.maximum(memory - device.memory, 0.0))
        excess[:, 0] = 0.0
        return excess

    def _near_times(self, device: DeviceCosts, longest: float) -> _Floats:
        """The times of parts that receive all values from their host; infinite for parts that do not fit."""
        size = self._sums.size
        before = np.concatenate([[0.0], np.cumsum(device.times), np.full(size, np.inf)])
        computing = sliding_window_view(before, size + 1) - before[: size + 1, None]
        width = max(2, int((computing <= longest * _ROUNDING).sum(axis=1).max()))
        near = self._sums.received_counts * device.near.per_value + self._sums.received_bytes * device.near.per_byte
        times = np.where(self._sums.memory <= device.memory, computing + near, np.inf)[:, :width]
        times[:, 0] = 0.0
        return times

    def best(self, combine: _Combine, score: _Score | None = None) -> list[int] | None:
        """Find the number of stages of each device for the least total score of their times; None if it is infinite."""
        size = self._sums.size
        later = np.full(size + 1, np.inf)
        later[size] = 0.0
        # For each run from the last one: the widths of the parts of its devices, by the stage where the run begins.
        choices: list[dict[int, list[_Widths]]] = []
        for run in reversed(self._runs):
            is_first, is_plain = run[0] == 0, len(run) == 1 or not self._is_far(run)
            if is_first or is_plain:
                later, widths = self._through(
                    run, later, 0, size + 1 if is_plain and not is_first else 0, combine, score
                )
                choices.append({0: widths})
                continue
            chosen: dict[int, list[_Widths]] = {}
            beginnings = np.full(size + 1, np.inf)
            for entry in self._entries[run[0]]:
                least, chosen[entry] = self._through(run, later, entry, entry, combine, score)
                beginnings[entry] = least[0]
            later = beginnings
            choices.append(chosen)
        if math.isinf(later[0]):
            return None
        counts, stage = [], 0
        for chosen in reversed(choices):
            entry = stage if stage in chosen else 0
            for device_widths in chosen[entry]:
                counts.append(int(device_widths[stage - entry]))
                stage += counts[-1]
        return counts

    def _is_far(self, run: Sequence[int]) -> bool:
        """Whether it matters to the devices of a run what comes from another host."""
        return self._has_links and any(self._devices[number].far_excess != (0, 0) for number in run)

    def _through(
        self, run: Sequence[int], later: _Floats, entry: int, far_before: int, combine: _Combine, score: _Score | None
    ) -> tuple[_Floats, list[_Widths]]:
        """The least scores from each stage on, from `entry` to the end, through the devices of a run; and the widths of their parts.

        Values from producers before the stage `far_before` come from another host.
        """
        widths_of_run = [self._costs[number].shape[1] for number in run]
        row_counts = [len(later) - entry] * len(run)
        if far_before == entry:
            # Where a run begins at one stage, only parts that begin where the devices before can reach matter.
            reached = (0, *itertools.accumulate(width - 1 for width in widths_of_run[:-1]))
            ends = (self._entries[number].stop - entry for number in run)
            row_counts = [min(1 + reach, end) for reach, end in zip(reached, ends, strict=True)]
        far_sums = None
        if self._is_far(run):
            is_callers = self._devices[run[0]].host == self._sums.stages.caller_host
            far_sums = self._sums.far(
                entry, max(row_counts), max(widths_of_run), before=far_before, without_caller=is_callers
            )
        least = later[entry:]
        all_widths = []
        for number, row_count in reversed(list(zip(run, row_counts, strict=True))):
            times = self._costs[number][entry : entry + row_count]
            width = times.shape[1]
            if far_sums is not None:
                per_value, per_byte = self._devices[number].far_excess
                far_counts, far_bytes = (sums[:row_count, :width] for sums in far_sums)
                times = times + far_counts * per_value + far_bytes * per_byte
            if score is not None:
                times = score(times)
                times[:, 0] = 0.0
            following = sliding_window_view(np.concatenate([least, np.full(width, np.inf)]), width)[:row_count]
            totals = combine(times, following)
            widths = totals.argmin(axis=1)
            least = totals[np.arange(row_count), widths]
            all_widths.append(widths)
        return least, all_widths[::-1]
