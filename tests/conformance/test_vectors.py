"""Every case of ``schema/vectors`` ends as it says."""

from pathlib import Path

import pytest

from tests.conformance.tiny import write
from tests.conformance.vectors import TINY, Case, broken_rules, cases


@pytest.mark.parametrize("case", cases(), ids=str)
def test_case(case: Case, tmp_path: Path) -> None:
    found = broken_rules(case, tmp_path)
    assert case.rules <= found <= case.rules | set(case.fields.get("also", []))


def test_each_case_says_one_thing() -> None:
    assert all(("rule" in case.fields) is not case.fields.get("ok", False) for case in cases())
    assert len({str(case) for case in cases()}) == len(cases())


def test_the_tiny_bundle_is_written_alike(tmp_path: Path) -> None:
    write(tmp_path / "tiny.stagepack")
    written = {path.name: path.read_bytes() for path in (tmp_path / "tiny.stagepack").iterdir()}
    assert written == {path.name: path.read_bytes() for path in TINY.iterdir()}
