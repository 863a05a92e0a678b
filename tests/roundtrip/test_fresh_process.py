"""Every case, cut into 1, 2 and 3 stages, answers in a fresh process bit for bit as the captured program does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.roundtrip.fresh_process import Runner, assert_right_in_fresh_process, started_runner
from tests.zoo.case import Case
from tests.zoo.cases import EXAMPLES, named
from tests.zoo.test_zoo import name_of, slow

CASES = [
    *EXAMPLES[::10],
    *named("decoders-llama-tied"),
    *slow(example for number, example in enumerate(EXAMPLES) if number % 10),
    *slow(
        named(
            "encoders-minilm",
            "vision-resnet",
            "encoders-bert",
            "decoders-llama",
            "decoders-gpt2",
            "encoder-decoders-t5",
            "vision-vit",
            "mixture-of-experts-mixtral",
            "audio-whisper",
        )
    ),
]
STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with started_runner() as process:
        yield process


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_bit_exact(case: Case, tmp_path: Path, runner: Runner) -> None:
    assert_right_in_fresh_process(
        case.capture(), operators=case.operators, stage_counts=STAGES, folder=tmp_path, runner=runner
    )
