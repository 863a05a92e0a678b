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
from typing import NamedTuple

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
        unit_stages, unit_devices, unit_bounds = _units(stages, devices)
        unit_counts = group_stages(unit_stages, unit_devices, pipelined=pipelined)
        return None if unit_counts is None else _stage_counts(unit_counts, unit_bounds)
    sums = _PartSums(stages)
    combine = np.maximum if pipelined else np.add

    def rate(counts: Sequence[int]) -> float:
        return _rate(stages, devices, counts, combine)

    candidates = [
        counts
        for used in (range(len(devices)), *_hosts_that_stand_together(devices))
        for counts in _fastest_groups(stages, sums, devices, used, combine)
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
    if len(stages.working_bytes) > _MOST_UNITS:
        unit_stages, unit_devices, unit_bounds = _units(stages, devices)
        return _stage_counts(group_with_least_excess(unit_stages, unit_devices), unit_bounds)
    counts = _Search(_PartSums(stages), devices, hosts=[0] * len(devices), of_excess=True).best(np.maximum)
    assert counts is not None  # every grouping has a finite excess
    return counts


def _fastest_groups(
    stages: StageCosts, sums: "_PartSums", devices: Sequence[DeviceCosts], used: Sequence[int], combine: "_Combine"
) -> Iterator[list[int]]:
    """Yield groupings for some of the devices, of which one is the fastest; none if no grouping fits."""
    used_devices = [devices[number] for number in used]
    # Any grouping that fits bounds how long a part of the best one can be.
    fitting = _Search(sums, used_devices, hosts=used).best(combine) if used else None
    if fitting is not None:
        bound = _rate(stages, used_devices, fitting, combine)
        for counts in (fitting, _Search(sums, used_devices, longest=bound).best(combine) or fitting):
            yield _spread(counts, used, len(devices))


def _rate(stages: StageCosts, devices: Sequence[DeviceCosts], counts: Sequence[int], combine: "_Combine") -> float:
    """The time of the slowest part, or the sum of the times."""
    times = [time.total for time in part_times(stages, devices, counts)]
    return max(times) if combine is np.maximum else sum(times)


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


def _units(stages: StageCosts, devices: Sequence[DeviceCosts]) -> tuple[StageCosts, list[DeviceCosts], list[int]]:
    """Join neighbours to units of about equal numbers of stages; return the costs of the units, and where they begin and end."""
    size = len(stages.working_bytes)
    bounds = [unit * size // _MOST_UNITS for unit in range(_MOST_UNITS + 1)]
    ranges = list(itertools.pairwise(bounds))
    unit_of_stage = [unit for unit, (start, end) in enumerate(ranges) for _ in range(start, end)]

    def joined(cost: SharedCost) -> SharedCost:
        users = sorted({unit_of_stage[user] for user in cost.users})
        return replace(cost, users=users, producer=unit_of_stage[cost.producer] if cost.producer >= 0 else -1)

    units = replace(
        stages,
        values=tuple(map(joined, stages.values)),
        weights=tuple(map(joined, stages.weights)),
        working_bytes=tuple(max(stages.working_bytes[start:end]) for start, end in ranges),
    )
    unit_devices = [
        replace(device, times=tuple(sum(device.times[start:end]) for start, end in ranges)) for device in devices
    ]
    return units, unit_devices, bounds


def _stage_counts(unit_counts: Sequence[int], unit_bounds: Sequence[int]) -> list[int]:
    """The numbers of stages in numbers of units."""
    ends = [unit_bounds[end] for end in (0, *itertools.accumulate(unit_counts))]
    return [end - start for start, end in itertools.pairwise(ends)]


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
        self.caller_host = stages.caller_host
        self.size = len(stages.working_bytes)
        self.uses = _uses(stages.values)
        # The numbers and the bytes of all values, and of those that do not come from the caller.
        self.received = _sums(self.uses, self.size)
        self.received_from_stages = _sums([use for use in self.uses if use.producer >= 0], self.size)
        _, weight_bytes = _sums(_uses(stages.weights), self.size)
        working_bytes = np.array([*stages.working_bytes, *[np.inf] * self.size], dtype=np.float64)
        peaks = np.maximum.accumulate(sliding_window_view(working_bytes, self.size), axis=1)
        # Infinite for parts that end behind the last stage.
        self.memory = weight_bytes + self.received[1]
        self.memory[:, 1:] += peaks


class _Use(NamedTuple):
    """The use of a value or a weight by a stage: parts that begin behind the one before, up to this stage, have its cost here."""

    producer: int
    behind: int
    user: int
    byte_count: int


def _uses(costs: Iterable[SharedCost]) -> list[_Use]:
    return [
        _Use(cost.producer, max(cost.producer, last_user), user, cost.cost)
        for cost in costs
        for last_user, user in itertools.pairwise((-1, *cost.users))
    ]


def _sums(uses: Sequence[_Use], size: int) -> _Floats:
    """The numbers and the bytes of what parts use: matrices ``[first stage, number of stages]``."""
    at_use = np.zeros((2, size + 2, 2 * size + 2))
    _, behind, users, byte_counts = np.array(uses, dtype=np.int64).reshape(-1, 4).T
    for plane, amounts in zip(at_use, (np.ones(len(uses)), byte_counts.astype(np.float64)), strict=True):
        np.add.at(plane, (behind + 1, users), amounts)
        np.add.at(plane, (users + 1, users), -amounts)
    np.cumsum(at_use, axis=1, out=at_use)
    kind_step, row_step, column_step = at_use.strides
    # [kind, first stage, number of stages before the use]
    band = as_strided(at_use, (2, size + 1, size), (kind_step, row_step + column_step, column_step))
    sums = np.zeros((2, size + 1, size + 1))
    np.cumsum(band, axis=2, out=sums[:, :, 1:])
    return sums


class _FarSums:
    """What parts receive from other hosts, where a host begins at a stage that moves on."""

    def __init__(self, sums: _PartSums, *, without_caller: bool) -> None:
        self._sums = np.zeros_like(sums.received)
        self._uses = sorted(use for use in sums.uses if not without_caller or use.producer >= 0)
        self._done = 0

    def before(self, beginning: int) -> _Floats:
        """Return the numbers and the bytes of the values from producers before a stage, which is no earlier one than last time."""
        widths = np.arange(self._sums.shape[2])
        while self._done < len(self._uses) and self._uses[self._done].producer < beginning:
            use = self._uses[self._done]
            rows = slice(use.behind + 1, use.user + 1)
            has_use = widths > np.arange(use.user - use.behind)[::-1, None]
            self._sums[0, rows] += has_use
            self._sums[1, rows] += has_use * float(use.byte_count)
            self._done += 1
        return self._sums


class _Search:
    """The best grouping among those whose parts compute no longer than a bound.

    `hosts` stands in the place of the hosts of the devices. `of_excess`: costs are bytes above the memory, not times.
    """

    def __init__(
        self,
        sums: _PartSums,
        devices: Sequence[DeviceCosts],
        *,
        longest: float = math.inf,
        hosts: Sequence[object] | None = None,
        of_excess: bool = False,
    ) -> None:
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
        near = self._sums.received[0] * device.near.per_value + self._sums.received[1] * device.near.per_byte
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
            is_far = self._has_links and any(self._devices[number].far_excess != (0, 0) for number in run)
            is_callers = self._devices[run[0]].host == self._sums.caller_host
            if run[0] > 0 and (len(run) == 1 or not is_far):
                all_far = self._sums.received_from_stages if is_callers else self._sums.received
                later, widths = self._through(run, later, None, all_far if is_far else None, combine, score)
                choices.append({0: widths})
                continue
            far_sums = _FarSums(self._sums, without_caller=is_callers)
            chosen: dict[int, list[_Widths]] = {}
            least_scores = np.full(size + 1, np.inf)
            for entry in self._entries[run[0]]:
                far = far_sums.before(entry) if is_far else None
                least, chosen[entry] = self._through(run, later, entry, far, combine, score)
                least_scores[entry] = least[0]
            later = least_scores
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

    def _through(
        self,
        run: Sequence[int],
        later: _Floats,
        entry: int | None,
        far: _Floats | None,
        combine: _Combine,
        score: _Score | None,
    ) -> tuple[_Floats, list[_Widths]]:
        """The least scores from each stage on, from the beginning of a run, through its devices; and the widths of their parts.

        entry: the stage where the run begins; None where it may begin at any stage. far: what parts receive from other hosts.
        """
        first = entry or 0
        row_counts = [len(later) - first] * len(run)
        if entry is not None:
            # Only parts that begin where the devices before can reach matter.
            reached = (0, *itertools.accumulate(self._costs[number].shape[1] - 1 for number in run[:-1]))
            ends = (self._entries[number].stop - first for number in run)
            row_counts = [min(1 + reach, end) for reach, end in zip(reached, ends, strict=True)]
        least = later[first:]
        all_widths = []
        for number, row_count in reversed(list(zip(run, row_counts, strict=True))):
            rows = slice(first, first + row_count)
            times = self._costs[number][rows]
            width = times.shape[1]
            if far is not None:
                per_value, per_byte = self._devices[number].far_excess
                times = times + far[0, rows, :width] * per_value + far[1, rows, :width] * per_byte
            if score is not None:
                times = score(times)
                times[:, 0] = 0.0
            following = sliding_window_view(np.concatenate([least, np.full(width, np.inf)]), width)[:row_count]
            totals = combine(times, following)
            widths = totals.argmin(axis=1)
            least = totals[np.arange(row_count), widths]
            all_widths.append(widths)
        return least, all_widths[::-1]
