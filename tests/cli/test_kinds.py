"""A command that takes a bundle, a delta or an adapter says what another folder is, and what to do with it."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from stagepack.cli import main
from tests.adapters.lora import TinyLayer, write_lora, write_tiny_adapter
from tests.conformance.vectors import TINY, TINY_DELTA

USES = {
    "bundle": "that was made for it",
    "delta": "apply it to its base (stagepack apply), or load the base with it (deltas=, --delta)",
    "adapter": "load its base with it (adapters=, --adapter), or merge it into its base (stagepack adapter --merge)",
    "peft": "the folder of an adapter of peft: write it for its bundle by stagepack adapter",
}
# Arguments with the place of the folder, {}, and what is expected there.
BUNDLE_COMMANDS = (
    "load {}",
    "load {} --stage 0",
    "recut {} --stages 2 -o out",
    "report {} -o out.html",
    "triton {} -o out",
    "profile {} -o out.json",
    "compile {} -o out",
    "onnx {}",
    "asset add {} readme",
    "export bundle --graph-from {} -o out",
    "delta {} bundle -o out",
    "apply {} delta -o out",
    "adapter peft --base {} -o out",
    "diff {} bundle",
)
COMMANDS = {
    "a bundle": BUNDLE_COMMANDS,
    "a delta": ("apply bundle {} -o out", "load bundle --delta {}"),
    "an adapter": ("load bundle --adapter {}", "diff adapter {}"),
    "the folder of an adapter of peft": ("adapter {} --base bundle -o out",),
    "a model": ("export {} -o out", "doctor {}"),
    "a checkpoint": ("export {} --graph-from bundle -o out",),
}
# Folders that a command takes, or that another part of it refuses.
TAKEN = {
    ("diff {} bundle", "adapter"),  # compares adapters
    ("diff adapter {}", "peft"),  # nothing is expected of a folder of no kind
    ("export {} -o out", "bundle"),
    ("doctor {}", "bundle"),
    ("export {} -o out", "peft"),
    ("doctor {}", "peft"),
    ("export {} --graph-from bundle -o out", "bundle"),
    ("export {} --graph-from bundle -o out", "peft"),
}
CASES = [
    (command, expected, found)
    for expected, commands in COMMANDS.items()
    for command in commands
    for found in USES
    if found not in expected and (command, found) not in TAKEN
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each kind, by the name of the kind."""
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "bundle").symlink_to(TINY)
    (folder / "delta").symlink_to(TINY_DELTA)
    write_tiny_adapter(folder / "adapter")
    write_lora(TinyLayer(), folder / "peft", {"layer": 2})
    (folder / "readme").write_text("")
    return folder


@pytest.mark.parametrize(("command", "expected", "found"), CASES)
def test_another_kind_is_named(
    command: str, expected: str, found: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders)
    before = sorted(os.listdir())
    result = CliRunner().invoke(main, command.format(found).split())
    assert (result.exit_code, len(result.output.splitlines())) == (1, 1), result.output
    assert USES[found] in result.output
    if found != "peft":
        assert f"expected {expected}, found {'an adapter' if found == 'adapter' else f'a {found}'}: " in result.output
    assert sorted(os.listdir()) == before
