"""The import contracts of pyproject.toml, as a list."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


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
