"""Tools of this project: runs of `make gpu` that are cut off, the wheels that it needs, and the tests of `make test-changed`."""

import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from tools import gpu_run, gpu_wheels
from tools.changed_tests import select_tests
from tools.gpu_run import Run, Step


@pytest.mark.process
def test_each_step_is_written_when_it_ends(tmp_path: Path) -> None:
    run = Run(tmp_path, 60, dict(os.environ))
    tables = {"tables": [{"title": "T", "columns": ["what", "ratio"], "rows": [["cut", 1.0251]]}]}
    outcome = f"open({str(tmp_path / 'good.jsonl')!r}, 'w').write('{{\"outcome\": \"passed\"}}\\n' * 3)"
    figures = f"open({str(tmp_path / 'good.json')!r}, 'w').write({json.dumps(tables)!r})"
    run.run(Step(name="good", arguments=("-c", f"{outcome}; {figures}"), seconds=20))
    assert "| good | passed |" in (tmp_path / "table.md").read_text()
    run.run(Step(name="bad", arguments=("-c", "raise SystemExit('no such operator')"), seconds=20))
    run.run(Step(name="slow", arguments=("-c", "import time; print('begun', flush=True); time.sleep(60)"), seconds=3))
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    expected = [("good", "passed"), ("bad", "failed"), ("slow", "cut off")]
    assert [(record["step"], record["outcome"]) for record in records] == expected
    details = ["3 passed", "exit status 1: no such operator", "after 3 s: begun"]
    assert [record["detail"] for record in records] == details
    table = (tmp_path / "table.md").read_text()
    assert "| cut | 1.025 |" in table
    assert "The end of `slow.log`:\n\n```text\nbegun\n```" in table


def test_a_step_without_time_is_not_run(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, dict(os.environ))
    run.run(Step(name="late", arguments=("-c", ""), seconds=20))
    assert [(entry.outcome, entry.detail) for entry in run.outcomes] == [("not run", "no time was left")]


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_without_cuda_no_step_is_run_and_each_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_run.main(["--out", str(tmp_path)])
    assert ended.value.code is False
    steps = gpu_run.steps_of("cuda:0", "full", tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [step.name for step in steps]
    assert all(f"not run     0.0 s  no CUDA: torch {torch.__version__} sees no GPU" in line for line in lines[1:-1])
    facts = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[0])["facts"]
    assert facts["torch"] == torch.__version__
    assert (tmp_path / "table.md").read_text().count("| not run | 0 | no CUDA") == len(steps)


def test_the_wheels_are_what_the_machine_lacks(tmp_path: Path) -> None:
    project = tomllib.loads((gpu_wheels.ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    names = {gpu_wheels.normalized(re.split(r"[^\w.-]", requirement)[0]) for requirement in required}
    carried = {gpu_wheels.normalized(name) for names in gpu_wheels.PACKAGES.values() for name in names}
    assert names - carried == gpu_wheels.PRESENT - {"sympy", "torch"}
    assert "torch" not in carried
    assert all("==" in requirement for requirement in gpu_wheels.pinned(carried))
    with pytest.raises(ValueError, match=r"constraints\.txt: expected a version of nothing, found none"):
        gpu_wheels.pinned(["nothing"])
    for size in (30_000_000, 31_000_000):
        with (tmp_path / f"{size}.whl").open("wb") as file:
            file.truncate(size)
    assert gpu_wheels.folder_bytes(tmp_path) == 61_000_000 > gpu_wheels.LIMIT_BYTES
    assert gpu_wheels.describe_folder(tmp_path)[-1].startswith("  61.0 MB  in 2 wheels")


def test_the_run_needs_the_standard_library_alone() -> None:
    source = Path(gpu_run.__file__).read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE))
    assert imported <= sys.stdlib_module_names


IMPORTERS = {
    "stagepack/format/reader.py": ["stagepack/opening.py", "tests/unit/test_reader.py", "stagepack/__init__.py"],
    "stagepack/opening.py": ["stagepack/roads/recut.py", "tests/remote/not_there/test_pull.py"],
    "stagepack/__init__.py": ["tests/unit/test_cut.py"],
    "stagepack/roads/recut.py": ["tests/unit/test_recut.py"],
}
FOLDERS = ["tests/cli", "tests/conformance", "tests/compat", "tests/docs"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("stagepack/opening.py", {"tests/unit/test_recut.py"}),
        ("stagepack/cli/verify_command.py", {"tests/cli"}),
        ("tests/unit/test_cut.py", {"tests/unit/test_cut.py"}),
        ("tests/cli/conftest.py", {"tests/cli"}),
        ("schema/SPEC.md", {"tests/conformance", "tests/compat"}),
        ("docs/how-to/serve.md", {"tests/docs"}),
        ("LICENSE", set()),
    ],
)
def test_a_changed_file_chooses_its_tests(changed: str, expected: set[str]) -> None:
    assert select_tests([changed], IMPORTERS, FOLDERS) == expected
