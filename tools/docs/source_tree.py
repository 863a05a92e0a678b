"""The packages of the tree, each with its modules and the first line of their docstrings."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("stagepack", "loaders/stagepack_loaders", "loaders/stagepack_serving")
FOLDERS = {
    "examples": "models to serve, and clients: sentence embeddings, pictures, text token by token",
    "schema": "the specification, JSON Schemas, test vectors for other readers, frozen bundles of each release",
    "docs": "this site",
    "tests": "unit, conformance, compat, hostile, roundtrip, onnx, serve, cli, docs; zoo: the models that must survive",
    "tools": "the demo, benchmarks, generators of schema and docs",
}


def source_tree() -> str:
    """A foldable table for each package."""
    parts = []
    for package in PACKAGES:
        for folder in (ROOT / package, *sorted(path.parent for path in (ROOT / package).glob("*/__init__.py"))):
            summary = _summary(folder / "__init__.py")
            rows = "\n".join(f"    | `{name}` | {text} |" for name, text in _modules(folder))
            table = f"\n\n    | module | |\n    |---|---|\n{rows}" if rows else ""
            parts.append(f'??? note "{folder.relative_to(ROOT)}: {_plain(summary)}"{table}')
    rows = "\n".join(f"| `{name}/` | {text} |" for name, text in FOLDERS.items())
    return "\n\n".join([*parts, f"| other folder | |\n|---|---|\n{rows}"])


def _modules(folder: Path) -> Iterator[tuple[str, str]]:
    """The modules of a package and of the packages below its first level."""
    for path in sorted(folder.rglob("*.py")):
        inner = path.relative_to(folder)
        is_of_subpackage = len(inner.parts) > 1 and (folder / inner.parts[0] / "__init__.py").exists()
        top = folder.name in {Path(package).name for package in PACKAGES}
        if path.name != "__init__.py" and not (top and is_of_subpackage):
            yield str(inner), _summary(path).replace("|", "\\|")


def _summary(path: Path) -> str:
    """The first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`")


def _plain(text: str) -> str:
    """A text without Markdown and quotes, for the title of a block."""
    return text.replace("`", "").replace('"', "'")
