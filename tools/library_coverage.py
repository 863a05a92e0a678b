"""The part of `docs/coverage.md` on models of libraries: what each side makes of a model of `tests/libraries`.

`make coverage-libraries` runs the tests of these models. They write the results, a JSON line for each model and side, into a file that a
run which was interrupted goes on with.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.utils import _pytree as pytree

from stagepack.capture.programs import Capture
from tests.libraries.case import LibraryCase
from tests.libraries.cases import STAGES
from tests.zoo.case import answers, captured_answers, other_size

RESULTS = Path(__file__).parents[1] / "build" / "library-coverage.jsonl"
RIGHT, WRONG, NONE = "right", "wrong", ""
COLUMNS = 12  # of the table of models
_PROGRAM_SCRIPT = Path(__file__).parents[1] / "tests" / "roundtrip" / "run_program.py"

Cells = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CapturedCase(LibraryCase):
    """A model that is captured once for all sides."""

    captured: Capture

    def capture(self) -> Capture:
        """The capture."""
        return self.captured


def captured_case(case: LibraryCase, capture: Capture) -> CapturedCase:
    """A model with its capture."""
    return CapturedCase(**{entry.name: getattr(case, entry.name) for entry in fields(case)}, captured=capture)


def eager(case: LibraryCase) -> Cells:
    """How far the captured program's answers are from those of the model, at the example's size and at another."""
    capture = case.capture()
    other = other_size(capture.program, capture.inputs)
    first = _difference(case, capture, other=False)
    return first, NONE if other is capture.inputs else _difference(case, capture, other=True)


def _difference(case: LibraryCase, capture: Capture, *, other: bool) -> str:
    calls = [other_size(capture.program, capture.inputs) if other else capture.inputs]
    assert capture.model is not None
    [wanted], [found] = answers(capture.model, calls), captured_answers(capture, calls)
    tensors = [
        (leaf, program_leaf)
        for leaf, program_leaf in zip(wanted, found, strict=True)
        if isinstance(leaf, torch.Tensor) and leaf.numel()
    ]
    largest = max(
        (
            float((leaf.to(torch.float64) - program_leaf.to(torch.float64)).abs().nan_to_num().max())
            for leaf, program_leaf in tensors
        ),
        default=0.0,
    )
    return f"off by {largest:.1g}" if largest else RIGHT


def program_file(case: LibraryCase) -> Cells:
    """Whether the program, as `torch.export.save` writes it, answers right in a fresh process without the library."""
    capture = case.capture()
    calls = [capture.inputs]
    if (other := other_size(capture.program, capture.inputs)) is not capture.inputs:
        calls.append(other)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.export.save(capture.program, folder / "m.pt2")
        for number, inputs in enumerate(calls):
            leaves = pytree.tree_leaves((tuple(inputs.args), dict(inputs.kwargs)))
            [wanted] = captured_answers(capture, [inputs])
            given_count = len(leaves)
            save_file(_tensors(leaves), folder / f"inputs-{number}.safetensors")
            # The leaves of the inputs after the call follow those of the answer.
            save_file(_tensors(wanted[: len(wanted) - given_count]), folder / f"expected-{number}.safetensors")
        command = [sys.executable, str(_PROGRAM_SCRIPT), name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last_line = (done.stderr.strip().splitlines() or ["?"])[-1]
            return f"raises {last_line.partition(':')[0].rpartition('.')[2]}", NONE
        first, *others = done.stdout.split()
    return first, others[0] if others else NONE


def _tensors(leaves: Sequence[object]) -> dict[str, torch.Tensor]:
    return {
        str(index): leaf.detach().clone().contiguous()
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
    }


def library_table(
    all_cases: Sequence[LibraryCase], found: Mapping[tuple[str, str], Cells], refused: Mapping[str, str]
) -> Iterator[str]:
    """The lines of a page on the models of libraries: those that are captured, and those that are refused with their reasons."""
    cases = [case for case in all_cases if (case.name, "fresh") in found]
    if not cases:
        return
    yield from ("", "## Models of libraries", "")
    yield (
        "Written by `make coverage-libraries`; each line is a model of `tests/libraries`, made by the constructor of its library with "
        "random weights, and exported in "
        f"{', '.join(map(str, STAGES[:-1]))} and {STAGES[-1]} stages."
    )
    yield ""
    yield "- **stagepack**: the stages in a fresh process without the library, held to the captured program bit for bit."
    yield "- **eager**: the captured program against the model itself; where torch computes an operator otherwise in a captured program,"
    yield "  the largest difference."
    yield "- **.pt2**: the whole program, as `torch.export.save` writes it, in a fresh process without the library."
    yield "- **pipelining** and **ONNX Runtime** as above; empty where they were not run yet."
    yield ""
    yield f"{len(cases)} of {len(all_cases)} models were run. Not captured: {len(refused)}, see below."
    yield ""
    yield from _summary(cases, found)
    yield ""
    yield (
        "| model | library | stagepack | other size | eager | other size | .pt2 | other size | pipelining | other size "
        "| ONNX Runtime whole | cut in three |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for case in cases:
        cells = [
            cell
            for side in ("fresh", "eager", "program_file", "theirs", "onnx")
            for cell in (*found.get((case.name, side), ()), NONE, NONE)[:2]
        ]
        yield f"| `{case.name}` | {case.row} | {' | '.join(cell.replace('|', '/').replace('](', '] (') for cell in cells)} |"
    yield from ("", "Not captured:", "")
    yield from (f"- `{name}`: `{reason}`" for name, reason in refused.items())


def _summary(cases: Sequence[LibraryCase], found: Mapping[tuple[str, str], Cells]) -> Iterator[str]:
    """A table with a line for each library."""
    yield (
        "| | models | stagepack right | eager right | .pt2 right | pipelining right | of other sizes | stagepack right | .pt2 right "
        "| pipelining right | ONNX Runtime whole right | cut in three right |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    rows: dict[str, list[LibraryCase]] = {}
    for case in cases:
        rows.setdefault(case.row, []).append(case)
    for row, group in [*rows.items(), ("**all**", list(cases))]:
        sides = {
            side: [found.get((case.name, side), (NONE, NONE)) for case in group]
            for side in ("fresh", "eager", "program_file", "theirs", "onnx")
        }
        are_dynamic = [cells[1] != NONE for cells in sides["fresh"]]
        counts = (
            len(group),
            _count(sides["fresh"]),
            _count(sides["eager"]),
            _count(sides["program_file"]),
            _count(sides["theirs"]),
            sum(are_dynamic),
            _count(sides["fresh"], are_dynamic),
            _count(sides["program_file"], are_dynamic),
            _count(sides["theirs"], are_dynamic),
            _count(sides["onnx"]),
            _count([(cells[0] and cells[1].partition(",")[0],) for cells in sides["onnx"]]),
        )
        yield f"| {row} | {' | '.join(map(str, counts))} |"


def read_line(cells: Sequence[str]) -> dict[tuple[str, str], Cells]:
    """What a line of the table says of a model, by the sides that were run."""
    name = cells[0].strip("`")
    sides = ("fresh", "eager", "program_file", "theirs", "onnx")
    found = {(name, side): tuple(cells[2 + 2 * index : 4 + 2 * index]) for index, side in enumerate(sides)}
    return {key: answers for key, answers in found.items() if any(answers)}


def read_results() -> dict[tuple[str, str], Cells]:
    """The results so far, by model and side."""
    results = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    return {(result["model"], result["side"]): tuple(result["cells"]) for result in results}


def write_result(name: str, side: str, cells: Cells) -> None:
    """Append the result of one side of a model."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps({"model": name, "side": side, "cells": cells}) + "\n")


def _count(found: Sequence[Cells], are_dynamic: Sequence[bool] | None = None) -> str:
    """How many models are right; of how many, where not all were run. With `are_dynamic`, at another size, of those that allow one."""
    if are_dynamic is None:
        answers = [cells[0] for cells in found]
    else:
        answers = [cells[1] or cells[0] for cells, is_dynamic in zip(found, are_dynamic, strict=True) if is_dynamic]
    if not (run_count := sum(answer != NONE for answer in answers)):
        return NONE
    right_count = str(answers.count(RIGHT))
    return right_count if run_count == len(answers) else f"{right_count} of {run_count}"
