"""The packages of the tree, each with its modules and the first line of their docstrings."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE_PATHS = ("stagepack", "loaders/stagepack_loaders", "loaders/stagepack_serving")
OTHER_FOLDERS = {
    "examples": "models to serve, and clients: sentence embeddings, pictures, text token by token",
    "schema": "the specification, JSON Schemas, test vectors for other readers, frozen bundles of each release",
    "docs": "this site",
    "tests": "unit, conformance, compat, hostile, roundtrip, onnx, serve, cli, docs; zoo: the models that must survive",
    "tools": "the demo, benchmarks, generators of schema and docs",
}


def source_tree() -> str:
    """A foldable table for each package."""
    page_parts = []
    for package_path in PACKAGE_PATHS:
        for package_folder in (
            ROOT / package_path,
            *sorted(path.parent for path in (ROOT / package_path).glob("*/__init__.py")),
        ):
            package_summary = _docstring_summary(package_folder / "__init__.py")
            table_rows = "\n".join(
                f"    | `{module_name}` | {module_summary} |"
                for module_name, module_summary in _module_summaries(package_folder)
            )
            module_table = f"\n\n    | module | |\n    |---|---|\n{table_rows}" if table_rows else ""
            page_parts.append(
                f'??? note "{package_folder.relative_to(ROOT)}: {_plain_text(package_summary)}"{module_table}'
            )
    table_rows = "\n".join(
        f"| `{module_name}/` | {module_summary} |" for module_name, module_summary in OTHER_FOLDERS.items()
    )
    return "\n\n".join([*page_parts, f"| other folder | |\n|---|---|\n{table_rows}"])


def _module_summaries(package_folder: Path) -> Iterator[tuple[str, str]]:
    """The modules of a package and of the packages below its first level."""
    for module_path in sorted(package_folder.rglob("*.py")):
        relative_path = module_path.relative_to(package_folder)
        is_of_subpackage = (
            len(relative_path.parts) > 1 and (package_folder / relative_path.parts[0] / "__init__.py").exists()
        )
        is_top_package = package_folder.name in {Path(package_path).name for package_path in PACKAGE_PATHS}
        if module_path.name != "__init__.py" and not (is_top_package and is_of_subpackage):
            yield str(relative_path), _docstring_summary(module_path).replace("|", "\\|")


def _docstring_summary(module_path: Path) -> str:
    """The first line of a module's docstring."""
    docstring_text = ast.get_docstring(ast.parse(module_path.read_text())) or ""
    return " ".join(docstring_text.split("\n\n")[0].split()).replace("``", "`")


def _plain_text(markdown_text: str) -> str:
    """A text without Markdown and quotes, for the title of a block."""
    return markdown_text.replace("`", "").replace('"', "'")


def import_contracts() -> list[dict[str, Any]]:
    """The contracts that import-linter keeps."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return contracts


def contract_list() -> str:
    """The names of the contracts as a list."""
    return "\n".join(f"- {contract['name']}" for contract in import_contracts())
