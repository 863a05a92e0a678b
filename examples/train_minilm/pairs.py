"""Pairs of texts of a domain that no published model knows: lines of a maintenance log, and what they mean.

A line such as ``K3 VLV E07 @N`` is written in the codes of one factory; its meaning is a sentence: "The valve of compressor three leaks, in
the north hall." Texts are made of templates, always the same ones for the same seed. Needs neither torch nor stagepack.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MACHINES = {
    "K": "compressor",
    "P": "pump",
    "F": "furnace",
    "C": "conveyor",
    "M": "mixer",
    "T": "turbine",
    "R": "robot arm",
    "L": "lathe",
}
NUMBERS = ("one", "two", "three", "four", "five", "six")
PARTS = {
    "VLV": "valve",
    "BRG": "bearing",
    "MTR": "motor",
    "SNR": "sensor",
    "GBX": "gearbox",
    "BLT": "belt",
    "FAN": "fan",
    "SEA": "seal",
}
FAULTS = {
    "E01": ("runs hot", "is too warm", "overheats"),
    "E02": ("shakes", "vibrates", "trembles badly"),
    "E03": ("does not start", "stays still after power-up", "refuses to start"),
    "E04": ("lacks oil", "is dry and needs lubrication", "has no lubricant left"),
    "E05": ("is loose", "has come off its mount", "needs tightening"),
    "E06": ("makes a loud noise", "screeches", "is noisy"),
    "E07": ("leaks", "drips on the floor", "loses fluid"),
    "E08": ("is blocked", "is clogged with dirt", "is jammed"),
    "E09": ("shows wrong readings", "reports nonsense values", "is out of calibration"),
    "E10": ("is cracked", "is broken", "has a fracture"),
}
SITES = {
    "N": "in the north hall",
    "S": "in the south hall",
    "W": "in the warehouse",
    "Y": "in the yard",
    "B": "in the basement",
}
ATTRIBUTES = (MACHINES, range(1, len(NUMBERS) + 1), PARTS, FAULTS, SITES)
LINE_TEMPLATES = (
    "{machine}{number} {part} {fault} @{site}",
    "@{site}: {fault} {machine}{number}/{part}",
    "{fault} {part} {machine}{number} {site}",
)
SENTENCE_TEMPLATES = (
    "The {part} of {machine} {number} {fault}, {site}.",
    "{site}, the {part} of {machine} number {number} {fault}.",
    "{machine} {number} {site}: its {part} {fault}.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A line of the log and its meaning."""

    line: str
    sentence: str


def held_out_pairs(count: int = 200) -> list[Pair]:
    """Return pairs of which each has a machine, part, fault and site that together are in no training pair."""
    events = _shuffled_events()[:count]
    return [_write(event, random.Random(number)) for number, event in enumerate(events)]  # noqa: S311 - no secret


def training_batches(batch_count: int, group_count: int, group_size: int = 16, held_out: int = 200) -> list[list[Pair]]:
    """Return batches of groups of pairs. The events of a group differ in one thing at least, and are alike in others, so that all count."""
    generator = random.Random(1)  # noqa: S311 - no secret
    kept_events = set(_shuffled_events()[:held_out])
    batches = []
    for _ in range(batch_count):
        events: list[Event] = []
        for _ in range(group_count):
            choices = [generator.sample(list(values), 2) for values in ATTRIBUTES]
            similar_events = [event for event in itertools.product(*choices) if event not in kept_events]
            events += generator.sample(similar_events, group_size)
        batches.append([_write(event, generator) for event in events])
    return batches


Event = tuple[Any, ...]  # machine, number, part, fault, site


def _shuffled_events() -> list[Event]:
    events = list(itertools.product(*ATTRIBUTES))
    random.Random(0).shuffle(events)  # noqa: S311 - no secret
    return events


def _write(event: Event, generator: random.Random) -> Pair:
    machine, number, part, fault, site = event
    line = _choose(LINE_TEMPLATES, generator).format(machine=machine, number=number, part=part, fault=fault, site=site)
    sentence = _choose(SENTENCE_TEMPLATES, generator).format(
        machine=MACHINES[machine],
        number=NUMBERS[number - 1],
        part=PARTS[part],
        fault=_choose(FAULTS[fault], generator),
        site=SITES[site],
    )
    return Pair(line=line, sentence=sentence[0].upper() + sentence[1:])


def _choose(options: Sequence[str], generator: random.Random) -> str:
    return options[generator.randrange(len(options))]
