"""Any change of the content of a bundle whose digests are right: it loads, or it meets one of our errors; it never crashes."""

import contextlib
import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stagepack
from stagepack.errors import StagepackError
from tests.bundle_editor import BundleEditor

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 64, 65, 2**31, 2**62, 2**63 - 1, -(2**63), 0.5, -0.0, 1e308,
    "", "x", "self", "for", "cpu", "cuda", "meta", "float32", "int64", "complex128", "batch", "linear_1", "w1", "first.weight",
    "aten.relu.default", "operator.add", "higher_order.cond", "tanh", "../x", "\0",
    [], [0], ["value", "linear_1"], ["value", "w1"], ["list", []], ["device", None], ["device", "cuda"], ["dtype", "int8"],
    ["complex", 1.0, 2.0], ["slice", 0, 1, None], ["subgraph", 0], {}, {"op": "add", "args": ["batch", 1]},
]  # fmt: skip


def places(thing: Any) -> Iterator[tuple[Any, Any]]:
    """Every place inside plain containers: (container, key)."""
    keys: Any = list(thing) if isinstance(thing, dict) else range(len(thing)) if isinstance(thing, list) else ()
    for key in keys:
        yield thing, key
        yield from places(thing[key])


def mutate(fields: Any, chance: random.Random) -> None:
    """Change one place: another value, a value from elsewhere, twice the same, nothing, or one more."""
    found = list(places(fields))
    container, key = chance.choice(found)
    how = chance.randrange(6)
    if how < 2:
        container[key] = copy.deepcopy(chance.choice(VALUES))
    elif how == 2:
        other, place = chance.choice(found)
        container[key] = copy.deepcopy(other[place])
    elif how == 3:
        del container[key]
    elif how == 4 and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    elif isinstance(container[key], int) and not isinstance(container[key], bool):
        container[key] += chance.choice([-1, 1, 64, -64])


def survives(path: Path) -> None:
    """Every road into the bundle ends well or in one of our errors."""
    for road in (lambda: stagepack.open(path).verify(), lambda: stagepack.load(path)):
        with contextlib.suppress(StagepackError):
            road()


TARGETS = ["manifest.json", "stage-1.msgpack", "stage-2.msgpack", "stage-2.safetensors", "shared-0.safetensors"]


def attack(editor: BundleEditor, target: str, chance: random.Random) -> None:
    """Mutate one file once to three times."""

    def change(fields: Any) -> None:
        for _ in range(chance.randint(1, 3)):
            mutate(fields, chance)

    if target == "manifest.json":
        editor.edit_manifest(change)
    elif target.endswith(".msgpack"):
        editor.edit_graph(int(target[6]), change)
    else:
        editor.edit_weight_header(target, change)


@pytest.mark.parametrize("target", TARGETS)
def test_a_mutated_bundle_loads_or_meets_one_of_our_errors(target: str, sound: Path, tmp_path: Path) -> None:
    editor = BundleEditor.copy(sound, tmp_path / "m.stagepack")
    originals = {name: (editor / name).read_bytes() for name in {"manifest.json", target}}
    for seed in range(120):
        attack(editor, target, random.Random(f"{target} {seed}"))  # noqa: S311 - the same each time is what is wanted
        try:
            survives(editor.path)
        except Exception as error:
            raise AssertionError(f"the mutation {target} {seed} is not survived") from error
        for name, content in originals.items():
            (editor / name).write_bytes(content)


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
