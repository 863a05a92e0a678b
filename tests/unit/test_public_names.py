"""The names of ``stagepack``: found by tab completion, imported when they are used, explained when a package is missing."""

import importlib.metadata
import re
import rlcompleter
import subprocess
import sys

import pytest

import stagepack
from stagepack import extras
from stagepack.errors import MissingPackageError, StagepackError


def test_the_version_is_that_of_the_package() -> None:
    assert stagepack.__version__ == importlib.metadata.version("stagepack")


def test_dir_and_tab_completion_show_the_public_names() -> None:
    assert set(stagepack.__all__) <= set(dir(stagepack))
    assert all(getattr(stagepack, name) is not None for name in stagepack.__all__)
    completer = rlcompleter.Completer({"stagepack": stagepack})
    matches: list[str] = []
    while (match := completer.complete("stagepack.", len(matches))) is not None:
        matches.append(match.rstrip("()").removeprefix("stagepack."))
    assert {name for name in stagepack.__all__ if not name.startswith("_")} <= set(matches)


def test_other_names_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'stagepack' has no attribute 'nothing'"):
        _ = stagepack.nothing


@pytest.mark.process
@pytest.mark.parametrize(
    ("package", "extra", "uses"),
    [
        ("torch", "torch", ["stagepack.export", "from stagepack import export", "stagepack.split_here"]),
        ("torch", "onnx", ["stagepack.add_onnx"]),
        ("onnx_ir", "onnx", ["stagepack.add_onnx"]),
        ("model_signing", "sign", ["stagepack.sign"]),
        ("ray", "ray", ["stagepack.ray", "from stagepack.ray import launch"]),
    ],
)
def test_a_missing_package_is_an_import_error_that_names_the_extra(package: str, extra: str, uses: list[str]) -> None:
    program = f"""
import sys
sys.modules[{package!r}] = None  # as Python itself marks a package that must not be found
import stagepack
for use in {uses!r}:
    try:
        exec(use)
    except ModuleNotFoundError as error:
        assert isinstance(error, stagepack.errors.MissingPackageError), repr(error)
        assert error.name.partition(".")[0] == {package!r}, error.name
        print(error)
"""
    messages = subprocess.check_output([sys.executable, "-c", program], text=True).splitlines()
    assert len(messages) == len(uses)
    for message in messages:
        assert re.fullmatch(
            rf"the package '{package}\S*' is not installed: the extra '{extra}' of stagepack "
            rf"\(in a checkout: pip install '\.\[{extra}\]'\) installs it",
            message,
        )


@pytest.mark.process
@pytest.mark.parametrize(
    ("uses", "packages"),
    [
        ("stagepack.Inputs, stagepack.open, stagepack.recut, stagepack.read_plan", {"torch"}),
        ("import stagepack.roads.compare", {"torch", "numpy"}),
    ],
    ids=["names that need no torch", "the comparison of bundles, without what cuts them"],
)
def test_what_is_not_used_is_not_imported(uses: str, packages: set[str]) -> None:
    program = f"import sys, stagepack; {uses}; print({packages!r} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"


def test_packages_of_others_are_not_explained() -> None:
    with (
        pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'") as raised,
        extras.explain_missing_packages(),
    ):
        importlib.import_module("no_such_package")
    assert not isinstance(raised.value, StagepackError)
    with pytest.raises(MissingPackageError, match="installs it") as explained, extras.explain_missing_packages():
        importlib.import_module("google.no_such_module")
    assert explained.value.name == "google.no_such_module"


def test_every_optional_dependency_has_the_extra_that_installs_it() -> None:
    distributions_of_extra: dict[str, set[str]] = {}
    for requirement in importlib.metadata.requires("stagepack") or ():
        if match := re.fullmatch(r"""([\w.-]+).*;\s*extra == ['"]([\w-]+)['"]""", requirement):
            distributions_of_extra.setdefault(match[2], set()).add(match[1].replace("_", "-").lower())
    distributions = {module_name: [module_name] for module_name in extras._EXTRAS}  # those that are not installed
    distributions |= importlib.metadata.packages_distributions()
    for module_name, its_extras in extras._EXTRAS.items():
        names = {distribution.replace("_", "-").lower() for distribution in distributions[module_name]}
        assert all(names & distributions_of_extra[extra] for extra in its_extras), module_name
    covered = {name.replace("_", "-").lower() for module_name in extras._EXTRAS for name in distributions[module_name]}
    optional = {
        name
        for extra, names in distributions_of_extra.items()
        if extra not in ("dev", "docs", "libraries")
        for name in names
    }
    assert optional - {"stagepack"} <= covered
