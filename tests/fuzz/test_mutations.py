"""Any change of a bundle whose digests are right: it is refused by one of our errors, or all roads to an answer give the same one."""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import StagepackError
from tests.bundle_editor import BundleEditor
from tests.fuzz.mutation import mutate_file
from tests.fuzz.roads import compare_roads
from tests.fuzz.statements import CHANGES, Statements


def survives(path: Path) -> None:
    """Every road into the bundle ends well or in one of our errors."""
    for road in (lambda: stagepack.open(path).verify(), lambda: stagepack.load(path)):
        with contextlib.suppress(StagepackError):
            road()


TARGETS = ["manifest.json", "stage-1.msgpack", "stage-2.msgpack", "stage-2.safetensors", "shared-0.safetensors"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_mutated_bundle_loads_or_meets_one_of_our_errors(target: str, sound: Path, tmp_path: Path) -> None:
    editor = BundleEditor.copy(sound, tmp_path / "m.stagepack")
    originals = {name: (editor / name).read_bytes() for name in {"manifest.json", target}}
    for seed in range(60):
        mutate_file(editor, target, random.Random(f"{target} {seed}"))  # noqa: S311 - the same each time is what is wanted
        try:
            survives(editor.path)
        except Exception as error:
            raise AssertionError(f"the mutation {target} {seed} is not survived") from error
        for name, content in originals.items():
            (editor / name).write_bytes(content)


def test_a_change_that_cannot_be_written_leaves_the_file_as_it_was(sound: Path, tmp_path: Path) -> None:
    editor = BundleEditor.copy(sound, tmp_path / "m.stagepack")

    def nest(fields: Any) -> None:
        for _ in range(2000):
            fields["inputs"] = [fields["inputs"]]

    mutate_file(editor, "stage-1.msgpack", random.Random(0), nest)  # noqa: S311 - the same each time is what is wanted
    stagepack.open(editor.path).verify()


@pytest.mark.parametrize("target", TARGETS)
def test_random_bytes_in_the_place_of_content_meet_one_of_our_errors(target: str, sound: Path, tmp_path: Path) -> None:
    editor = BundleEditor.copy(sound, tmp_path / "m.stagepack")
    chance = random.Random(target)  # noqa: S311 - the same each time is what is wanted
    whole, manifest = (editor / target).read_bytes(), (editor / "manifest.json").read_bytes()
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            start = chance.randrange(len(content))
            content[start : start + chance.randint(0, 9)] = chance.randbytes(chance.randint(0, 9))
        if target == "manifest.json":
            (editor / target).write_bytes(content)
        else:
            editor.write_file(target, bytes(content))
        survives(editor.path)
        (editor / "manifest.json").write_bytes(manifest)


INPUTS = {"forward": {"ids": torch.arange(6).reshape(2, 3)}}


def test_all_roads_of_an_honest_bundle_answer_alike(sound: Path, tmp_path: Path) -> None:
    compare_roads(sound, sound, INPUTS, tmp_path)


@pytest.mark.parametrize("change", dict.fromkeys(CHANGES), ids=lambda change: change.__name__)
def test_a_changed_statement_changes_no_answer_of_one_road_alone(
    change: Callable[[Statements], None], sound: Path, tmp_path: Path
) -> None:
    for seed in range(3):
        editor = BundleEditor.copy(sound, tmp_path / f"{seed}.stagepack")
        chance = random.Random(f"{change.__name__} {seed}")  # noqa: S311 - the same each time is what is wanted
        statements = Statements(editor, chance)
        change(statements)
        statements.write(restated=chance.random() < 0.5)
        (scratch := tmp_path / str(seed)).mkdir()
        with contextlib.suppress(StagepackError):
            compare_roads(editor.path, sound, INPUTS, scratch)
