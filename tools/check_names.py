"""Measure how readable Python files are: words of identifiers, names that say nothing, long functions and long files.

A binding is one place where an identifier gets its meaning: a function, a class, a parameter, the target of an assignment, a loop, a
comprehension, a ``with`` or an ``except``. The words of an identifier are separated by underscores and capitals. The names that say
nothing are listed in ``docs/glossary.md``; the field `name` of a class says something, since the class stands before it.
A function is long from 51 lines on. A file may be longer than 400 lines when a line of it begins with ``# Long because``.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

GLOSSARY = Path("docs/glossary.md")
FUNCTION_LINES = 50
FILE_LINES = 400
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_UNCOUNTED = frozenset({"self", "cls", "_"})


def bindings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the identifier of each binding of a syntax tree; a field or attribute begins with a dot.

    Special names such as ``__init__`` are left out.
    """
    fields = {
        statement.target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                identifier = node.name
            case ast.arg():
                identifier = node.arg
            case ast.Name(ctx=ast.Store()):
                identifier = f".{node.id}" if node in fields else node.id
            case ast.Attribute(ctx=ast.Store()):
                identifier = f".{node.attr}"
            case ast.ExceptHandler() if node.name is not None:
                identifier = node.name
            case _:
                continue
        if identifier not in _UNCOUNTED and not identifier.lstrip(".").startswith("__"):
            yield node.lineno, identifier


def word_count(identifier: str) -> int:
    """The number of words of an identifier, at least 1."""
    return max(1, len(_WORD.findall(identifier)))


def is_vague(identifier: str, vague: frozenset[str]) -> bool:
    """Whether an identifier of `bindings` says nothing."""
    return identifier.lstrip("._") in vague and identifier not in (".name", ".names")


def vague_names(glossary: str) -> frozenset[str]:
    """The names that the glossary lists as saying nothing."""
    section = glossary.partition("## Names that say nothing")[2]
    return frozenset(re.findall(r"`([a-z]+)`", section.rpartition("\n\n")[2]))


def function_lengths(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the name of each function and method, and how many lines it has with its docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            yield node.name, node.end_lineno - node.lineno + 1


def python_files(paths: Iterable[Path]) -> list[Path]:
    """The Python files among the paths and in the folders among them."""
    files = {file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])}
    return sorted(files)


def main() -> None:
    """Print the figures of the given files and folders, and exit with status 1 when they miss the bounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, help="Python files, and folders of them")
    parser.add_argument("--least-words", type=float, default=1.3, help="mean number of words of a binding")
    parser.add_argument("--most-vague", type=float, default=2.0, help="share of bindings that say nothing, in percent")
    parser.add_argument("--most-long", type=float, default=1.5, help="share of long functions, in percent")
    parser.add_argument(
        "--list", action="store_true", help="print every binding that says nothing and every long function"
    )
    parser.add_argument("--common", type=int, default=0, help="print so many of the most common one-word names")
    options = parser.parse_args()
    vague = vague_names(GLOSSARY.read_text())
    counts: Counter[str] = Counter()
    functions = long_functions = 0
    long_files: list[str] = []
    for path in python_files(options.paths):
        source = path.read_text()
        tree = ast.parse(source)
        for line, identifier in bindings(tree):
            counts[identifier] += 1
            if options.list and is_vague(identifier, vague):
                print(f"{path}:{line}: {identifier}")
        for function, lines in function_lengths(tree):
            functions += 1
            long_functions += lines > FUNCTION_LINES
            if options.list and lines > FUNCTION_LINES:
                print(f"{path}: {function} has {lines} lines")
        if source.count("\n") > FILE_LINES and not re.search(r"^# Long because", source, re.MULTILINE):
            long_files.append(str(path))
    total = max(1, counts.total())
    words = sum(word_count(identifier) * count for identifier, count in counts.items()) / total
    vague_share = 100 * sum(count for identifier, count in counts.items() if is_vague(identifier, vague)) / total
    long_share = 100 * long_functions / max(1, functions)
    print(f"{total} bindings, {words:.2f} words each, {vague_share:.1f} % say nothing")
    print(f"{functions} functions, {long_share:.1f} % longer than {FUNCTION_LINES} lines")
    single = [(identifier, count) for identifier, count in counts.most_common() if word_count(identifier) == 1]
    for identifier, count in single[: options.common]:
        print(f"{count:5d} {identifier.lstrip('.')}")
    misses = []
    if words < options.least_words:
        misses.append(f"expected at least {options.least_words} words a binding")
    if vague_share > options.most_vague:
        misses.append(f"expected at most {options.most_vague} % of names that say nothing: --list prints them")
    if long_share > options.most_long:
        misses.append(f"expected at most {options.most_long} % of long functions: --list prints them")
    if long_files:
        misses.append(
            f"more than {FILE_LINES} lines: {', '.join(long_files)}: divide them, or say why: # Long because ..."
        )
    if misses:
        sys.exit("\n".join(misses))


if __name__ == "__main__":
    main()
