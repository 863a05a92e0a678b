"""Print the test files that import what differs from a commit: ``python -m tools.changed_tests [BASE]``, main by default.

A test is chosen if it differs itself, imports a file that differs, or imports one that imports it. A file that no other file imports by
name, such as a command, and what is no Python choose the folder of tests that has the name of their package.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
STEPS = 2  # Imports of imports: more of them lead from most files to most tests.
# Folders of tests for what is no Python file.
_TESTS_OF_FOLDER = {"schema": ("tests/conformance", "tests/compat"), "docs": ("tests/docs",)}


def main() -> None:
    """Print the files, one a line."""
    base = sys.argv[1] if len(sys.argv) > 1 else "main"
    changed = {
        *_lines("git", "diff", "--name-only", base),
        *_lines("git", "ls-files", "--others", "--exclude-standard"),
    }
    graph = json.loads(
        "".join(_lines(sys.executable, "-m", "ruff", "analyze", "graph", "--direction", "dependents", "-q", "."))
    )
    folders = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").iterdir() if path.is_dir()}
    selected = sorted(select_tests(changed, graph, folders))
    if not selected:
        sys.exit(f"no test imports what differs from {base}")
    print(*selected, sep="\n")


def select_tests(changed: Iterable[str], importers: Mapping[str, Sequence[str]], folders: Iterable[str]) -> set[str]:
    """Return the files and folders of tests to run.

    Args:
        changed: the paths that differ, relative to the root of the tree.
        importers: for each Python file, the files that import it.
        folders: the folders of `tests`.
    """
    tests: set[str] = set()
    for path in map(PurePosixPath, changed):
        reached = frontier = {str(path)}
        for _ in range(STEPS):
            # Package files import everything for its public name.
            frontier = {
                name for file in frontier for name in importers.get(file, ()) if not name.endswith("__init__.py")
            }
            reached = reached | frontier
        found = {name for name in reached if PurePosixPath(name).name.startswith("test_")}
        if path.name == "conftest.py" or not found:
            mirrored = _TESTS_OF_FOLDER.get(path.parts[0]) or [f"tests/{part}" for part in path.parts]
            found |= {str(path.parent)} if path.parts[0] == "tests" else set(mirrored) & set(folders)
        tests |= {name for name in found if (ROOT / name).exists()}
    return tests


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


if __name__ == "__main__":
    main()
