"""`tools.docs.outputs` writes what commands print, and refuses a page with a failure that it does not state."""

from pathlib import Path

import pytest

from tools.docs import outputs
from tools.docs.session import page_environment

FAILED_TESTS = "echo '1 failed, 2 passed in 0.10s'"
TRACEBACK = "echo 'Traceback (most recent call last):'"
INTERNAL_ERROR = "echo 'stagepack: internal error: KeyError'"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a page in a tree of its own."""
    monkeypatch.setattr(outputs, "ROOT", tmp_path)
    return tmp_path / "page.md"


def written(page: Path, text: str) -> str:
    """The page after its outputs are written."""
    page.write_text(text)
    outputs.rewrite_page(Path(page.name), page.parent / "work", run_slow=False, rewrite_all=False)
    return page.read_text()


def console(*lines: str, above: str = "") -> str:
    """A page with one console block."""
    return "\n".join([above, "```console", *lines, "```", ""])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (console("$ echo 1"), console("$ echo 1", "1")),
        (console("$ false", "[exit status 1]"), console("$ false", "[exit status 1]")),
        (
            console("$ echo no && false", "[exit status 1]"),
            console("$ echo no && false", "no", "[exit status 1]"),
        ),
        (
            console(f"$ {FAILED_TESTS}", above="<!-- fails: a reason -->"),
            console(f"$ {FAILED_TESTS}", "1 failed, … passed in … s", above="<!-- fails: a reason -->"),
        ),
    ],
)
def test_outputs_and_stated_failures_are_written(before: str, after: str, page: Path) -> None:
    assert written(page, before) == after


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (console("$ false"), r"line 2: the block fails with \[exit status 1\]"),
        (console("$ exit 2", "[exit status 1]"), r"\[exit status 2\]"),
        (console(f"$ {FAILED_TESTS}"), "failed tests: 1 failed, … passed"),
        (console("$ echo '2 errors in 0.10s'"), "failed tests: 2 errors"),
        (console(f"$ {TRACEBACK}"), "a traceback"),
        (console(f"$ {INTERNAL_ERROR}"), "an internal error"),
        (console(f"$ {INTERNAL_ERROR}", above="<!-- fails: a reason -->"), "an internal error"),
        (console(f"$ {INTERNAL_ERROR}", "stagepack: internal error: KeyError"), "an internal error"),
        pytest.param("```python\nraise ValueError\n```\n", "the block of line 1 raised", marks=pytest.mark.slow),
        pytest.param("```python\nprint(1)\n```\n", 'no block `text title="Output"` follows', marks=pytest.mark.slow),
    ],
)
def test_a_page_with_another_failure_stays_as_it_is(text: str, says: str, page: Path) -> None:
    with pytest.raises(outputs.PageError, match=says):
        written(page, text)
    assert page.read_text() == text


def test_the_exit_status_says_that_a_page_was_refused(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page.write_text(console("$ false"))
    monkeypatch.setattr("sys.argv", ["outputs", page.name])
    with pytest.raises(SystemExit, match="1"):
        outputs.main()
    assert capsys.readouterr().err.startswith("page.md: not written: line 2")


def test_variables_that_change_outputs_do_not_reach_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CI", "PYTEST_ADDOPTS", "STAGEPACK_TRACEBACK"):
        monkeypatch.setenv(name, "1")
    environment = page_environment(tmp_path)
    assert not {"CI", "PYTEST_ADDOPTS", "STAGEPACK_TRACEBACK"} & environment.keys()
    assert environment["HF_HUB_OFFLINE"] == "1"
