"""The rules of form of the source: where docstrings have sections, and what is imported by a string."""

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import stagepack
from stagepack_train import EXTENSION

ROOT = Path(stagepack.__file__).parents[1]
SOURCES = sorted(path for folder in ("stagepack", "loaders") for path in (ROOT / folder).rglob("*.py"))
SECTIONS = ("Args:", "Returns:", "Raises:", "Yields:")
# What docs/reference/api.md shows besides the names of `stagepack`, what others implement, and the base classes of both.
PUBLIC = {
    "stagepack.format.bundle_files.BundleFiles",
    "stagepack.format.listed_files.ListedFiles",
    "stagepack_loaders.pipeline.CallablePipeline",
    "stagepack_loaders.distributed.connect.connect",
    "stagepack_loaders.distributed.pipeline.DistributedPipeline",
    "stagepack_loaders.distributed.ray_launcher.launch",
    "stagepack_loaders.entry_points.EntryPointPipelines",
    "stagepack_text.settings.GenerationSettings",
    "stagepack_loaders.local_pipeline.Pipeline",
    "stagepack_loaders.pipeline_sequence.PipelineSequence",
    "stagepack_loaders.registry.register_runtime",
    "stagepack_loaders.torch.stage.TorchStage",
    "stagepack_loaders.run_trace.write_trace",
    "stagepack_loaders.update_report.UpdateReport",
    "stagepack_train.training.Training",
    *(".".join(home) for home in (*stagepack._HOMES.values(), *EXTENSION.public_names.values())),
}
PUBLIC_MODULES = {"stagepack.errors", "stagepack_loaders.base"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("loaders.").removesuffix(".__init__")


def functions(node: ast.AST, path: str, *, is_interface: bool = False) -> Iterator[tuple[str, bool, Function]]:
    """The functions in a node, their paths, and whether they belong to an interface that others implement."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            bases = {ast.unparse(base).partition("[")[0] for base in child.bases}
            is_class_interface = is_interface or bool(bases & {"Protocol", "ABC"})
            yield from functions(child, f"{path}.{child.name}", is_interface=is_class_interface)
        elif isinstance(child, Function):
            yield f"{path}.{child.name}", is_interface, child
            yield from functions(child, f"{path}.{child.name}", is_interface=is_interface)
        else:
            yield from functions(child, path, is_interface=is_interface)


def is_public(path: str) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in PUBLIC | PUBLIC_MODULES)


def test_docstrings_have_sections_on_public_names_and_interfaces_alone() -> None:
    found = [
        name
        for source in SOURCES
        for name, is_interface, function in functions(parsed(source), module_name(source))
        if any(section in (ast.get_docstring(function) or "") for section in SECTIONS)
        if not is_public(name) and (not is_interface or re.match("_[^_]", function.name))
    ]
    assert found == []


def test_the_class_is_described_and_not_its_init() -> None:
    found = [
        name
        for source in SOURCES
        for name, _, function in functions(parsed(source), module_name(source))
        if function.name == "__init__" and ast.get_docstring(function)
    ]
    assert found == []


def test_only_the_package_imports_its_own_modules_by_a_string() -> None:
    found = [
        f"{source.relative_to(ROOT)}:{node.lineno}"
        for source in SOURCES
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("import_module")
        and isinstance(node.args[0], ast.Constant)
        and str(node.args[0].value).startswith("stagepack")
    ]
    assert [place.partition(":")[0] for place in found] == ["stagepack/__init__.py"]


def test_each_module_of_stagepack_is_in_a_band_of_the_arrow() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers, arrow = (
        {name for layer in contract["layers"] for name in re.split(r" [:|] ", layer)}
        for contract in contracts
        if contract["type"] == "layers" and contract.get("containers", ["stagepack"]) == ["stagepack"]
    )
    placed = {name.removeprefix("stagepack.") for name in arrow if name.startswith("stagepack.")}
    assert placed == layers - {"__main__", "examples"}


def test_a_public_name_means_one_thing() -> None:
    # Names that others choose, and examples.
    allowed = {"TritonPythonModel", "command", "inputs", "main", "make"}
    homes: dict[str, set[str]] = {}
    for source in SOURCES:
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(module_name(source))
    assert {name: modules for name, modules in homes.items() if len(modules) > 1 and name not in allowed} == {}
