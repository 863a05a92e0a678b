"""Check the form of Python files: where comments and docstrings begin, one subject a module, and lengths.

A comment or a docstring begins with its noun, and not with a word that points elsewhere. The docstring of a module of stagepack or of the
loaders has no list: a list of subjects is two modules. A file has at most 400 lines, unless a line of it begins with ``# Long because``.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 50
_POINTERS = re.compile(r"(Of|Those|They|It|Such|None of|Likewise|So many|So long|Fewer|In this order)\b")
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def nounless_lines(source: str) -> Iterator[int]:
    """Yield the lines of the comments, without those that continue one, and of the docstrings that begin with a pointer."""
    previous_line = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_own_line = token.line[: token.start[1]].strip() == ""
            if not (is_own_line and previous_line == token.start[0] - 1) and _POINTERS.match(
                token.string.lstrip("#: ")
            ):
                yield token.start[0]
            previous_line = token.start[0] if is_own_line else 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | _FUNCTION) and _POINTERS.match(ast.get_docstring(node) or ""):
            yield node.body[0].lineno


def has_list(source: str) -> bool:
    """Whether the docstring of a module has a list."""
    return re.search(r"^\s*[-*] ", ast.get_docstring(ast.parse(source)) or "", re.MULTILINE) is not None


def function_lengths(source: str) -> list[int]:
    """The number of lines of each function and method, with its docstring."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, _FUNCTION)]
    return [(function.end_lineno or function.lineno) - function.lineno + 1 for function in functions]


def main() -> None:
    """Print the lines that miss the form, and exit with status 1 when they miss the bounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--most", type=int, default=20, help="places without a noun, and modules with a list")
    parser.add_argument("--most-long", type=float, default=1.5, help="share of long functions, in percent")
    options = parser.parse_args()
    places, lengths, misses = [], [], []
    for path in sorted(path for folder in options.folders for path in folder.rglob("*.py")):
        source = path.read_text()
        places += [f"{path}:{line}: begins without its noun" for line in nounless_lines(source)]
        if path.parts[0] in ("stagepack", "loaders") and has_list(source):
            places.append(f"{path}:1: a list of subjects: divide the module")
        if source.count("\n") > FILE_LINES and not re.search(r"^# Long because", source, re.MULTILINE):
            misses.append(f"{path}: more than {FILE_LINES} lines: divide it, or say why: # Long because ...")
        lengths += function_lengths(source)
    long_share = 100 * sum(length > FUNCTION_LINES for length in lengths) / max(1, len(lengths))
    print("\n".join([*places, f"{len(places)} places, {long_share:.1f} % of functions over {FUNCTION_LINES} lines"]))
    if len(places) > options.most:
        misses.append(f"expected at most {options.most} places, found {len(places)}")
    if long_share > options.most_long:
        misses.append(f"expected at most {options.most_long} % of long functions, found {long_share:.1f} %")
    sys.exit("\n".join(misses) or None)


if __name__ == "__main__":
    main()
