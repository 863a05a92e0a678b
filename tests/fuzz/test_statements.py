"""Bundles that change one statement of several that must agree: all roads to an answer give the same one, or refuse the bundle."""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stagepack.errors import StagepackError
from tests.bundle_editor import BundleEditor
from tests.fuzz.roads import compare_roads
from tests.fuzz.statements import CHANGES, Statements

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
