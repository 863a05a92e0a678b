"""`make test-changed` chooses the tests that import what differs."""

import pytest

from tools.changed_tests import select_tests

IMPORTERS = {
    "stagepack/format/reader.py": ["stagepack/opening.py", "tests/unit/test_reader.py", "stagepack/__init__.py"],
    "stagepack/opening.py": ["stagepack/recutter.py", "tests/remote/not_there/test_pull.py"],
    "stagepack/__init__.py": ["tests/unit/test_cut.py"],
    "stagepack/recutter.py": ["tests/unit/test_recut.py"],
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
