"""Every cut of a model, cut again, gives the bytes of a direct export."""

from pathlib import Path

import pytest

import stagepack
from stagepack.exporter import export_capture
from stagepack.partition.cut_options import CutOptions
from tests.unit.test_recut import files
from tests.zoo.case import Case
from tests.zoo.cases import ROWS, named
from tests.zoo.test_zoo import name_of, slow

# Of many nodes.
LARGE = named(
    "containers-cache-of-any-length",
    "containers-static-cache-as-an-input",
    "decoders-llama-tied",
    "encoder-decoders-t5",
)
CASES = [*(case for case in ROWS[::16] if case not in LARGE), *slow([*ROWS[8::16], *LARGE])]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_cut_from_every_cut(case: Case, tmp_path: Path) -> None:
    capture = case.capture()
    cuts = [
        CutOptions(),
        CutOptions(stages=2),
        CutOptions(stages=5, shared="transmit"),
        CutOptions(stages=3, speeds=[1, 3, 2], memory=["1GiB", "24GB", 10**9]),
    ]
    direct = [tmp_path / f"{index}.stagepack" for index in range(len(cuts))]
    for cut_options, path in zip(cuts, direct, strict=True):
        export_capture(capture, out=path, cut_options=cut_options)
    for source in direct:
        for cut_options, expected_path in zip(cuts, direct, strict=True):
            again = stagepack.recut(
                source,
                out=tmp_path / "again.stagepack",
                stages=cut_options.stages,
                shared=cut_options.shared,
                speeds=cut_options.speeds,
                memory=cut_options.memory,
                overwrite=True,
            )
            assert files(again.path) == files(expected_path), (source.name, expected_path.name)
