"""Extensions are found by the entry points of installed distributions, and what is missing is named."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import stagepack
import stagepack_text
import stagepack_train
from stagepack.capture.extensions import source_extensions
from stagepack.errors import MissingPackageError
from stagepack.extensions import export_option, home_of, installed_extensions, pipeline_method
from stagepack_serving.server.extensions import server_extensions

Distribution = Callable[[str, str], None]


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Distribution]:
    """A function that installs a distribution: its name, and the text of its entry points."""

    def install(name: str, entry_points: str) -> None:
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (folder / "entry_points.txt").write_text(f"[stagepack.extensions]\n{entry_points}\n")
        monkeypatch.syspath_prepend(tmp_path)
        installed_extensions.cache_clear()

    yield install
    for lookup in (installed_extensions, pipeline_method, server_extensions, source_extensions):
        lookup.cache_clear()


def test_the_distribution_registers_each_extension_of_the_project() -> None:
    for package in (stagepack_text, stagepack_train):
        assert installed_extensions()[f"{package.__name__}:EXTENSION"] is package.EXTENSION
    assert [type(extension).__name__ for extension in server_extensions()] == ["TextExtension"]


def test_a_pipeline_generates_by_the_function_that_an_extension_states(
    distribution: Distribution, tmp_path: Path
) -> None:
    from stagepack_text.generate import generate

    assert pipeline_method("generate") is generate
    distribution("stagepack", "")
    pipeline_method.cache_clear()
    with pytest.raises(
        MissingPackageError, match="the method generate of a pipeline: expected one installed extension"
    ):
        pipeline_method("generate")


def test_the_option_generate_of_an_export_is_a_function_of_an_extension(distribution: Distribution) -> None:
    from stagepack_text.export.generation import generating_model

    assert export_option("generate") is generating_model
    distribution("stagepack", "")
    with pytest.raises(MissingPackageError, match="the option generate of an export: expected one installed extension"):
        export_option("generate")


def test_an_export_takes_the_models_of_a_library_that_an_extension_knows(
    distribution: Distribution, tmp_path: Path
) -> None:
    (tmp_path / "library_package.py").write_text(
        """
import torch
from stagepack.capture.extensions import LibraryModel
from stagepack.capture.inputs import Inputs
from stagepack.extensions import Extension

class Plan(torch.nn.Module):
    def draw(self, x): return x + 1

class Drawn(LibraryModel):
    description, files = "a plan", {"plan.json": b"{}"}
    def __init__(self, plan):
        super().__init__()
        self.plan = plan
    def example(self): return Inputs(args=(torch.zeros(2),))
    def forward(self, x): return self.plan.draw(x)

class Source:
    def wrap(self, model): return Drawn(model) if isinstance(model, Plan) else None
    def reads(self, source): return False

SOURCE = Source()
EXTENSION = Extension(source=("library_package", "SOURCE"))
"""
    )
    distribution("library", "library = library_package:EXTENSION")
    source_extensions.cache_clear()
    from library_package import Plan  # type: ignore[import-not-found]

    bundle = stagepack.export(Plan(), out=tmp_path / "plan.stagepack")
    assert bundle.read("plan.json") == b"{}"
    assert stagepack.load(bundle)(torch.ones(2)).tolist() == [2, 2]


def test_a_server_whose_extensions_are_not_installed_does_not_start(distribution: Distribution) -> None:
    distribution("stagepack", "")
    server_extensions.cache_clear()
    with pytest.raises(
        MissingPackageError, match=r"expected the extensions of stagepack .*, found none: install stagepack again"
    ):
        server_extensions()


def test_each_public_name_is_that_of_the_home_that_an_extension_states() -> None:
    from stagepack_train.start import train

    assert stagepack.train is train
    names = [name for extension in installed_extensions().values() for name in extension.public_names]
    assert set(names) <= set(stagepack.__all__) - set(stagepack._HOMES)


@pytest.mark.parametrize("name", ["other", "train"])
def test_a_distribution_of_others_adds_an_extension(name: str, distribution: Distribution, tmp_path: Path) -> None:
    (tmp_path / "other_package.py").write_text(
        "from stagepack.extensions import Extension\nEXTENSION = Extension(public_names={'draw': ('other_package', 'x')})"
    )
    distribution("other", f"{name} = other_package:EXTENSION")
    assert home_of("draw") == ("other_package", "x")
    assert home_of("train") == ("stagepack_train.start", "train")
    with pytest.raises(
        AttributeError, match="has no attribute 'draw'"
    ):  # names beside `__all__` are no part of the API
        _ = stagepack.draw


@pytest.mark.parametrize("name", ["train", "other"])
def test_a_name_of_two_extensions_is_refused(name: str, distribution: Distribution, tmp_path: Path) -> None:
    (tmp_path / "imitation.py").write_text("from stagepack_train import EXTENSION")
    distribution("imitation", f"{name} = imitation:EXTENSION")
    with pytest.raises(
        MissingPackageError, match="found imitation:EXTENSION and stagepack_train:EXTENSION: remove one"
    ):
        _ = stagepack.train


def test_a_name_whose_extension_is_not_installed_says_so(distribution: Distribution) -> None:
    distribution("stagepack", "")
    with pytest.raises(
        MissingPackageError, match=r"stagepack\.train: expected one installed extension .*, found none: install"
    ):
        _ = stagepack.train
    with pytest.raises(ImportError, match="expected one installed extension"):
        from stagepack import train  # noqa: F401


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("no_such_package:EXTENSION", "No module named 'no_such_package'"),
        ("stagepack_train:NOTHING", "module 'stagepack_train' has no attribute 'NOTHING'"),
        ("stagepack_train.start:train", "found function"),
        ("broken_package:EXTENSION", "found: boom"),
        ("stagepack_train.extension", "No module named"),
    ],
)
def test_an_extension_that_cannot_be_loaded_is_named_with_its_distribution(
    value: str, found: str, distribution: Distribution, tmp_path: Path
) -> None:
    (tmp_path / "broken_package.py").write_text("raise RuntimeError('boom')")
    distribution("broken", f"wrong = {value}")
    with pytest.raises(
        MissingPackageError, match=f"'wrong' .* at {value}, .*{found}.*: install broken again"
    ) as raised:
        _ = stagepack.train
    assert raised.value.name == value.partition(":")[0]


@pytest.mark.process
def test_extensions_are_searched_only_for_names_that_have_no_other_home() -> None:
    code = """
import sys, stagepack
stagepack.open, dir(stagepack), hasattr(stagepack, "nothing")
print(sorted({"importlib.metadata", "stagepack.extensions", "stagepack_train"} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
