"""The packages of the tree, each with its modules and the first line of their docstrings."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.docs.markdown import folded_block, table

ROOT = Path(__file__).parents[2]
PACKAGE_PATHS = ("stagepack", "loaders/stagepack_loaders", "loaders/stagepack_serving")
OTHER_FOLDERS = {
    "examples": "models to serve, and clients: sentence embeddings, pictures, text token by token",
    "schema": "the specification, JSON Schemas, test vectors for other readers, frozen bundles of each release",
    "docs": "these pages",
    "tests": "unit, conformance, compat, hostile, roundtrip, onnx, serve, cli, docs; zoo: the models that must survive; laws: sweeps; "
    "public_faults: reports on other tools",
    "tools": "the demo, benchmarks, generators of schema and docs",
}


def source_tree() -> str:
    """A foldable table for each package."""
    page_parts = []
    for package_path in PACKAGE_PATHS:
        subpackages = sorted(path.parent for path in (ROOT / package_path).glob("*/__init__.py"))
        for folder in (ROOT / package_path, *subpackages):
            summary = _docstring_summary(folder / "__init__.py").replace("`", "").removeprefix("stagepack: ")
            rows = [(f"`{name}`", module_summary) for name, module_summary in _module_summaries(folder)]
            content = table(("module", "content"), rows) if rows else "No other modules."
            page_parts.append(folded_block(f"{folder.relative_to(ROOT)}: {summary}", content))
    other_rows = [(f"`{name}/`", summary) for name, summary in OTHER_FOLDERS.items()]
    return "\n\n".join([*page_parts, table(("other folder", "content"), other_rows)])


def _module_summaries(package_folder: Path) -> Iterator[tuple[str, str]]:
    """The modules of a package, and those below it that are in no package of the first level."""
    is_top_package = package_folder.name in {Path(package_path).name for package_path in PACKAGE_PATHS}
    for module_path in sorted(package_folder.rglob("*.py")):
        path = module_path.relative_to(package_folder)
        is_of_subpackage = len(path.parts) > 1 and (package_folder / path.parts[0] / "__init__.py").exists()
        if path.name != "__init__.py" and not (is_top_package and is_of_subpackage):
            yield str(path), _docstring_summary(module_path).replace("|", "\\|")


def _docstring_summary(module_path: Path) -> str:
    """The first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(module_path.read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split()).replace("``", "`")


def import_contracts() -> list[dict[str, Any]]:
    """The contracts that import-linter keeps."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return contracts


def contract_list() -> str:
    """The contracts as a list: of each its name, and below it its modules and its exceptions."""
    return "\n".join(
        line
        for contract in import_contracts()
        for line in (f"- {contract['name']}", *(f"    - {detail}" for detail in _contract_details(contract)))
    )


def _contract_details(contract: dict[str, Any]) -> Iterator[str]:
    """The lines below the name of a contract."""
    if layers := contract.get("layers"):
        yield f"layers, from the top: {'; '.join(_code_names(layer.replace(' : ', ' | ').split(' | ')) for layer in layers)}"
    if modules := contract.get("source_modules") or contract.get("modules") or contract.get("ancestors"):
        yield f"modules: {_code_names(modules)}"
    if forbidden_modules := contract.get("forbidden_modules"):
        indirectly = "" if contract.get("allow_indirect_imports") else ", directly or through other modules"
        yield f"not imported{indirectly}: {_code_names(forbidden_modules)}"
    imports_by_importer: dict[str, list[str]] = {}
    for allowed_import in contract.get("ignore_imports", ()):
        importer, _, imported = allowed_import.partition(" -> ")
        imports_by_importer.setdefault(importer, []).append(imported)
    for importer, imported_names in imports_by_importer.items():
        yield f"except: `{importer}` may import {_code_names(imported_names)}"


def _code_names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
