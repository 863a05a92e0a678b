"""Write `docs/coverage.md`: every model of the zoo, what becomes of it here, in `torch.distributed.pipelining`, and in ONNX Runtime.

Each model runs in a process of its own, two at a time. Ours is what the test of the zoo says; theirs is cut in three even parts and
held to the same answers; onnx is what ONNX Runtime answers, to the whole model and cut in three. The tables of training and of models of
libraries were measured once, and stay.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from stagepack.capture.inputs import Inputs
from stagepack.format.folded_graph import trivially_folded
from stagepack.format.graph import Graph
from stagepack.format.graph_codec import encode_graph
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.folding import fold_graph
from stagepack.graph.model_assembly import canonical_graph
from stagepack.graph.repeats import find_repeats
from stagepack.linearize import linearize_program
from tests.zoo import in_onnxruntime
from tests.zoo.architectures.refused import REASON, REFUSED
from tests.zoo.case import Case, answers, assert_equal, captured_answers, other_size
from tests.zoo.cases import ARCHITECTURES, CASES, EXAMPLES, ROWS
from tests.zoo.test_zoo import test_bit_exact
from tools import pipelining

PAGE = Path(__file__).parents[1] / "docs" / "coverage.md"
LIMIT = 300  # seconds a model and side
HEAD = """\
# What survives the cut

Written by `make coverage`; each line is a model of `tests/zoo`.

- **stagepack** cuts it in 2, 3 and 5 stages, folds each, and is held to the answers of the captured program bit for bit, three
  calls in a row, state included; so it is in 3 even stages that run by the modules of the model (`modules=True`). Cut again
  from 2 stages to 5, the bundle must come out the same.
- **pipelining** is `torch.distributed.pipelining` of torch {torch_version}: the same model in 3 even parts, in one process,
  held to the same answers.
- **ONNX Runtime** is held to the same answers within a tolerance (1e-3 of the value for float32). **whole**: the model as
  `torch.onnx.export(dynamo=True)` writes it, one call. **cut in three**: the bundle with the files of `stagepack onnx`, four
  calls; stages that have no ONNX form, or that ONNX Runtime has no CPU kernel for, run in torch.
- **other size** is a call with other sizes than the example's, where the model allows them.
- **regions** are the parts of the uncut graph that stand in it once and are called several times; **smaller** is how many
  times smaller they make its file. (The models are tiny: few layers, so few calls.)
"""
COLUMNS = 10  # of the table of models
STATIC_TABLES = ("## Training\n", "## Not captured\n")  # they are between these headings of the page
RIGHT, WRONG, NONE = "right", "wrong", ""
# Rows that are not about a model alone, and the tests that hold them.
ELSEWHERE = {
    'weights: `shared="transmit"`': [
        "tests/unit/test_recut.py::test_a_transmitted_weight_lives_in_one_stage_and_travels"
    ],
    "state: the same 32 greedy tokens as transformers": [
        "tests/roundtrip/test_generation.py::test_greedy_tokens_are_those_of_transformers"
    ],
    "cuts: any `policy`, also one that goes back and forth between stages": [
        "tests/zoo/test_zoo.py::test_back_and_forth",
        "tests/unit/test_cut.py::test_a_policy_sees_nodes_and_may_go_back_and_forth",
    ],
    "cuts: a cycle is refused with its path printed": ["tests/unit/test_cut.py::test_a_cut_that_cannot_be_is_refused"],
    "cuts: before the first or after the last operator, two at one place": [
        "tests/unit/test_cut.py::test_empty_stages_are_refused",
        "tests/unit/test_cut.py::test_a_cut_that_cannot_be_is_refused",
    ],
    "cuts: more stages than nodes": ["tests/unit/test_cut.py::test_more_stages_than_places_to_cut_at_are_refused"],
}


def main() -> None:
    """Run all models and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="run only the models whose name has this in it, keep what the page says of others"
    )
    parser.add_argument(
        "--side",
        action="append",
        choices=[side.__name__ for side in SIDES],
        help="run this side, or several, and keep the others",
    )
    options = parser.parse_args()
    sides = [side for side in SIDES if not options.side or side.__name__ in options.side]
    page = PAGE.read_text()
    start, end = map(page.index, STATIC_TABLES)
    work = [(case, side) for case in CASES if options.only in case.name for side in sides]
    PAGE.write_text("\n".join(text(read(page) | run(work), page[start:end])) + "\n")


# What is said of a side: right or what went wrong, with the example's sizes and with others; of ours also what was folded.
Cells = tuple[str, ...]
Side = Callable[[Case], Cells]
Found = dict[tuple[str, str], Cells]


def ours(case: Case) -> Cells:
    """What the test says of a model, whether its sizes may change, its regions, and how much smaller these make its graph."""
    with tempfile.TemporaryDirectory() as folder:
        test_bit_exact(case, Path(folder))
    capture = case.capture()
    other = NONE if other_size(capture.program, capture.inputs) is capture.inputs else RIGHT
    return (RIGHT, other, *_folded(canonical_graph(linearize_program(capture).graph)))


def _folded(graph: Graph) -> Cells:
    folded = fold_graph(graph)
    if not folded.regions:
        return ("lost" if find_repeats(GraphAnalysis(graph)).repeats else NONE, NONE)
    unfolded = len(encode_graph(trivially_folded(graph)))
    return str(len(folded.regions)), f"{unfolded / len(encode_graph(folded)):.1f}"


def theirs(case: Case) -> Cells:
    """Whether `torch.distributed.pipelining` keeps the answers of a model, and whether it does at another size."""
    capture = case.capture()
    other = other_size(capture.program, capture.inputs)
    wanted = captured_answers(capture, [capture.inputs] * 3)
    others_wanted = captured_answers(capture, [other] * 3)
    first = _pipelined(case, [capture.inputs] * 3, wanted)
    return first, NONE if other is capture.inputs else _pipelined(case, [other] * 3, others_wanted)


def _pipelined(case: Case, calls: list[Inputs], wanted: list[list[Any]]) -> str:
    torch.manual_seed(0)
    try:
        found = answers(pipelining.cut(*case.build(), pipelining.evenly(3)), calls)
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        return f"raises {type(error).__name__}"
    try:
        assert_equal(found, wanted)
    except (AssertionError, ValueError):
        return WRONG
    return RIGHT


def onnx(case: Case) -> Cells:
    """What ONNX Runtime answers to the model exported whole by torch, and cut in three, or why it does not."""
    capture = case.capture()
    with tempfile.TemporaryDirectory() as folder:
        first = in_onnxruntime.whole(capture, Path(folder))
        found = in_onnxruntime.cut(case, capture, Path(folder))
    in_torch = "; ".join(f"stage {number} in torch: {reason}" for number, reason in found.torch_only.items())
    return first, f"{found.answer}, {in_torch}" if in_torch else found.answer


SIDES: tuple[Side, ...] = (ours, theirs, onnx)


def read(page: str) -> Found:
    """What a page says of models."""
    found: Found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == COLUMNS and cells[0].startswith("`"):
            name = cells[0].strip("`")
            found |= {
                (name, "ours"): tuple(cells[2:6]),
                (name, "theirs"): tuple(cells[6:8]),
                (name, "onnx"): tuple(cells[8:]),
            }
    return found


def run(work: list[tuple[Case, Side]]) -> Found:
    """Run each side of each model in a process of its own."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = pool.map(lambda job: _in_a_process(*job), work)
        return {(case.name, side.__name__): answer for (case, side), answer in zip(work, answers, strict=True)}


def _in_a_process(case: Case, side: Side) -> Cells:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(case, side, sender))
    process.start()
    sender.close()
    try:
        answer: Cells = receiver.recv() if receiver.poll(LIMIT) else (f"takes over {LIMIT} s", NONE)
    except EOFError:
        answer = ("crashes", NONE)
    process.kill()
    process.join()
    sys.stderr.write(f"{case.name}: {side.__name__}: {answer}\n")
    return answer


def _child(case: Case, side: Side, sender: Connection) -> None:
    """Send what becomes of a model; what torch writes meanwhile is dropped."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, sys.stdout.fileno())
    os.dup2(silent, sys.stderr.fileno())
    torch.set_num_threads(1)
    try:
        sender.send(side(case))
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        sender.send((f"raises {type(error).__name__}", NONE))


def text(found: Found, static_tables: str) -> Iterator[str]:
    """The lines of the page."""
    yield HEAD.format(torch_version=torch.__version__.split("+")[0])
    yield (
        "| | models | stagepack right | pipelining right | of other sizes | stagepack right | pipelining right | wrong without a word "
        "| ONNX Runtime whole right | cut in three right | in ONNX Runtime alone |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name, group in (
        ("torch's export examples", EXAMPLES),
        ("rows below", ROWS),
        ("transformers architectures", ARCHITECTURES),
    ):
        mine = [found[case.name, "ours"] for case in group]
        other = [found[case.name, "theirs"] for case in group]
        runtime = [found[case.name, "onnx"] for case in group]
        wrong = sum(WRONG in cells for cells in other)
        counts = (
            len(mine),
            _right(mine, 0),
            _right(other, 0),
            len(mine) - _fixed(mine),
            _right(mine, 1),
            _right(other, 1),
            wrong,
            _right(runtime, 0),
            sum(cells[1].startswith(RIGHT) for cells in runtime),
            _right(runtime, 1),
        )
        yield f"| {name} | {' | '.join(map(str, counts))} |"
    ratios = [float(cells[3]) for case in CASES if len(cells := found[case.name, "ours"]) == 4 and cells[3]]
    yield ""
    yield (
        f"{len(ratios)} of {len(CASES)} models have regions: their graphs are {min(ratios)} to {max(ratios)} times smaller, "
        f"in the median {statistics.median(ratios):.1f}."
    )
    yield from ("", "## Rows", "", "| row | tests |", "|---|---|")
    rows: dict[str, list[str]] = {}
    for case in ROWS:
        rows.setdefault(case.row, []).append(f"`{case.name}`")
    for row, names in [*rows.items(), *((row, [f"`{name}`" for name in names]) for row, names in ELSEWHERE.items())]:
        yield f"| {row} | {', '.join(names)} |"
    yield from ("", "A model `NAME` is the test `tests/zoo/test_zoo.py::test_bit_exact[NAME]`.", "", "## Models", "")
    yield "| model | row | stagepack | other size | regions | smaller | pipelining | other size | ONNX Runtime whole | cut in three |"
    yield "|---|---|---|---|--:|--:|---|---|---|---|"
    for case in CASES:
        cells = (*(*found[case.name, "ours"], NONE, NONE)[:4], *found[case.name, "theirs"], *found[case.name, "onnx"])
        yield f"| `{case.name}` | {case.row} | {' | '.join(cell.replace('|', '/').replace('](', '] (') for cell in cells)} |"
    yield from ("", static_tables.rstrip("\n"))
    yield from ("", "## Not captured", "")
    yield "Architectures that neither `torch.export` nor transformers' exporter captures, so that there is nothing to cut:"
    yield ""
    yield from (f"- `{case.name}`: {REASON}" for case in REFUSED)


def _right(found: list[Cells], size: int) -> int:
    """How many are right: at the example's size (0), or at another (1)."""
    return sum(cells[size] == RIGHT for cells in found)


def _fixed(found: list[Cells]) -> int:
    """How many allow no other size."""
    return sum(cells[1] == NONE for cells in found)


if __name__ == "__main__":
    main()
