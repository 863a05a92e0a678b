"""Models of every kind, also with 16 requests of changing sizes in flight, answer as in one process: values, containers and strides."""

from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.capture.inputs import Inputs
from tests.distributed.bundles import check_case, check_in_flight, check_in_turn
from tests.zoo.architectures.encoders import minilm_encoder_folder
from tests.zoo.case import Case
from tests.zoo.cases import CASES, named
from tests.zoo.test_zoo import name_of

REQUESTS = 16
MODELS = named(
    "decoders-llama", "decoders-llama-tied", "encoder-decoders-t5", "operators-custom-operators",
    "operators-custom-operator-that-writes", "shapes-nonzero", "shapes-sizes-from-data", "values-u-net",
    "weights-tied-at-both-ends",
)  # fmt: skip
IN_CI = ("values-u-net", 3)
# Models that are called in turn: one of each kind; `make test-zoo` runs all.
QUICK = named(
    "aliasing-inputs-written", "operators-custom-operators", "shapes-nonzero", "shapes-sizes-from-data",
    "state-static-cache-decoder", "values-strided-values-cross", "values-u-net", "weights-scalars-and-empty-tensors",
    "weights-tied-at-both-ends",
)  # fmt: skip
# Their random operators draw from generators of their own in each process.
DRAWING = {
    "operators-dropout-that-draws",
    "operators-draws-of-every-kind",
    "operators-draws-in-two-branches",
    "operators-layers-with-dropout-in-train-mode",
    "operators-one-draw-used-in-every-layer",
    "regions-cond-that-draws",
}


def run_param(case: Case, processes: int, *, is_quick: bool) -> Any:
    return pytest.param(case, processes, marks=() if is_quick else pytest.mark.slow, id=f"{name_of(case)}-{processes}")


@pytest.mark.parametrize(
    ("case", "processes"),
    [
        run_param(case, 2 + number % 3, is_quick=case in QUICK)
        for number, case in enumerate(case for case in CASES if case.name not in DRAWING)
    ],
)
def test_processes_answer_as_one(case: Case, processes: int, tmp_path: Path) -> None:
    check_case(case, tmp_path, processes, [None, 3, None, 3], check_in_turn)


@pytest.mark.parametrize(
    ("case", "processes"),
    [
        run_param(case, processes, is_quick=(case.name, processes) == IN_CI)
        for case in MODELS
        for processes in (2, 3, 4)
    ],
)
def test_requests_in_flight(case: Case, processes: int, tmp_path: Path) -> None:
    growths = [number % 5 if number % 3 else None for number in range(REQUESTS)]
    check_case(case, tmp_path, processes, growths, check_in_flight)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_published_weights(processes: int, tmp_path: Path) -> None:
    bundle = stagepack.export(minilm_encoder_folder(), out=tmp_path / "minilm.stagepack", stages=processes)
    generator = torch.Generator().manual_seed(0)
    calls = []
    for number in range(REQUESTS):
        ids = torch.randint(1, 3000, (1 + number % 3, 4 + 29 * number % 50), generator=generator)
        calls.append(Inputs(kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids)}))
    check_in_flight(bundle, calls)
