"""Compare the files in the folder of a bundle with the manifest (SPEC D1, D2)."""

from collections.abc import Iterable
from pathlib import Path

from stagepack.errors import DigestError, Problem
from stagepack.format.digest import sha256_of_file
from stagepack.format.manifest import File


def is_plain_file(path: Path) -> bool:
    """Whether a path is a file, and neither a link nor a folder, device or pipe."""
    return path.is_file() and not path.is_symlink()


def check_size(folder: Path, entry: File) -> list[Problem]:
    """Compare the size of a file with the manifest (D1), without reading the file.

    Args:
        folder: The folder of the bundle.
        entry: The manifest entry of the file.

    Returns:
        One problem if the file is missing, is not a plain file or has another size; otherwise an empty list.
    """
    path = folder / entry.name
    try:
        actual_size = path.lstat().st_size
    except OSError:
        return [Problem(rule="D1", where=entry.name, message="the file is missing")]
    if not is_plain_file(path):
        return [Problem(rule="D1", where=entry.name, message="not a plain file")]
    if actual_size != entry.size:
        message = f"expected {entry.size} bytes, found {actual_size}"
        return [Problem(rule="D1", where=entry.name, message=message)]
    return []


def check_digest(folder: Path, entry: File) -> list[Problem]:
    """Compare the size and the content of a file with the manifest (D1 and D2). Reads the whole file.

    Args:
        folder: The folder of the bundle.
        entry: The manifest entry of the file.

    Returns:
        One problem if the file is missing or differs; otherwise an empty list.
    """
    problems = check_size(folder, entry)
    if not problems and (actual_digest := sha256_of_file(folder / entry.name)) != entry.sha256:
        problems = [digest_problem(entry, actual_digest)]
    return problems


def check_digests(folder: Path, entries: Iterable[File]) -> list[Problem]:
    """Return the problems that `check_digest` finds in several files. The files are read in parallel threads.

    Args:
        folder: the folder of the bundle.
        entries: the manifest entries of the files.
    """
    # The import takes 20 ms, which opening a bundle does not need.
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

    with ThreadPoolExecutor() as pool:
        problem_lists = pool.map(lambda entry: check_digest(folder, entry), entries)
        return [problem for problems in problem_lists for problem in problems]


def digest_problem(entry: File, actual_digest: str) -> Problem:
    """Return the D2 problem of a file whose content has another digest than the manifest lists.

    Args:
        entry: the manifest entry of the file.
        actual_digest: the SHA-256 of the content, in hexadecimal.
    """
    message = f"the content was changed: expected sha256 {entry.sha256}, found {actual_digest}"
    return Problem(rule="D2", where=entry.name, message=message)


def raise_digest_problems(problems: list[Problem]) -> None:
    """Raise one error with all the problems, if there are any.

    Raises:
        DigestError: `problems` is not empty.
    """
    if problems:
        raise DigestError(problems)
