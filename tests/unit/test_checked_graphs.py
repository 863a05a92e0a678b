"""The record of checked graphs: a graph is checked once for each content and each version, and a hostile one is never in it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import FormatError
from stagepack.torch_internals import operators_without_compiler
from stagepack_loaders.torch import prepare, value_check
from tests.bundle_editor import BundleEditor
from tests.hostile.tiny import write_tiny


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of three stages, and a record that is empty: the export has checked them, too."""
    bundle = write_tiny(tmp_path / "tiny.stagepack")
    monkeypatch.setenv(prepare.CHECKED_GRAPHS_VARIABLE, str(tmp_path / "record"))
    return bundle


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the graph files that were checked, in order."""
    names: list[str] = []
    check_values = value_check.check_graph_values

    def check(graph: Any, operators: Any, graph_name: str) -> None:
        names.append(graph_name)
        check_values(graph, operators, graph_name)

    monkeypatch.setattr(prepare, "check_graph_values", check)
    return names


GRAPHS = [f"stage-{number}.msgpack" for number in range(3)]


def test_a_graph_is_checked_once(tiny: Path, checked: list[str], tmp_path: Path) -> None:
    stagepack.load(tiny)
    assert checked == GRAPHS
    stagepack.load(tiny)
    shutil.copytree(tiny, tmp_path / "copy.stagepack")
    stagepack.load(tmp_path / "copy.stagepack")
    assert checked == GRAPHS


def test_graphs_whose_calls_are_known_need_no_search_for_what_hides_from_the_compiler(
    tiny: Path, checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value_check, "_RESULTS", {})
    searches: list[int] = []

    def search() -> Any:
        searches.append(1)
        return operators_without_compiler()

    monkeypatch.setattr(value_check, "operators_without_compiler", search)
    stagepack.load(tiny)
    first_count = len(searches)
    assert first_count >= 1
    shutil.rmtree(tiny.parent / "record")
    stagepack.load(tiny)
    assert (checked, len(searches)) == (GRAPHS * 2, first_count)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch, "__version__", "0.0.0"),
        (prepare, "_code_digest", lambda: "0"),
        (torch, "get_default_dtype", lambda: torch.float64),
    ],
    ids=["torch", "code", "default dtype"],
)
def test_another_version_checks_it_again(
    owner: Any, name: str, value: Any, tiny: Path, checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stagepack.load(tiny)
    monkeypatch.setattr(owner, name, value)
    stagepack.load(tiny)
    assert checked == GRAPHS * 2


def test_a_graph_whose_digest_is_not_compared_is_checked_each_time(tiny: Path, checked: list[str]) -> None:
    for verify in ("full", "manifest", "off", "off"):
        stagepack.load(tiny, verify=verify)
    assert checked == GRAPHS * 3


def test_without_a_record_it_is_checked_each_time(
    tiny: Path, checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(prepare.CHECKED_GRAPHS_VARIABLE, "")
    stagepack.load(tiny)
    stagepack.load(tiny)
    assert checked == GRAPHS * 2


def test_a_graph_that_states_other_values_is_refused_each_time(tiny: Path, checked: list[str]) -> None:
    stagepack.load(tiny)

    def widen(fields: dict[str, Any]) -> None:
        node = next(node for node in fields["nodes"] if node["outputs"])
        node["outputs"][0]["dtype"] = "float64"

    BundleEditor(tiny).edit_graph(1, widen)
    for _ in range(2):
        with pytest.raises(FormatError, match="G16"):
            stagepack.load(tiny)
    assert checked == [*GRAPHS, "stage-1.msgpack", "stage-1.msgpack"]
