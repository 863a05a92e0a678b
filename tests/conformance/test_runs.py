"""Every case of ``schema/vectors/runs``: a bundle that runs has the values that it says, and refuses inputs that do not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import InputError
from tests.conformance.vectors import VECTORS, Case, edit_bundle

CASES = [
    Case(kind="runs", file=path.stem, fields=fields)
    for path in sorted((VECTORS / "runs").glob("*.json"))
    for fields in json.loads(path.read_text())["cases"]
]


def tensor(fields: dict[str, Any]) -> torch.Tensor:
    numbers = [float(number) for number in fields["data"]]  # some are texts, such as NaN
    return torch.tensor(numbers, dtype=getattr(torch, fields["dtype"])).reshape(fields["shape"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, tmp_path: Path) -> None:
    bundle = stagepack.open(edit_bundle(case, tmp_path))
    inputs = {name: tensor(fields) for name, fields in case.fields["inputs"].items()}
    pipeline = stagepack.load(bundle)
    if case.fields.get("refused"):
        with pytest.raises(InputError):
            pipeline(**inputs)
        return
    values = dict(inputs)
    for number, stage in enumerate(bundle.stages):
        outputs = stagepack.load_stage(bundle, number)(*(values[name] for name in stage.inputs))
        values |= zip(stage.outputs, outputs, strict=True)
    expected = {name: tensor(fields) for name, fields in case.fields["values"].items()}
    (result,) = pipeline(**inputs)
    for found in (values, {"result": result}):
        for name in expected.keys() & found.keys():
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, equal_nan=True)
    assert expected.keys() == values.keys() - inputs.keys()
