"""What every attack on a bundle must meet: one typed error that says what, where and what to do, before a weight is read."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner, Result

import stagepack
from stagepack.cli import main
from stagepack.errors import StagepackError
from tests.bundle_editor import BundleEditor

STAGES = range(3)  # of the bundle that is attacked


class Seen(Enum):
    """Where an attack is seen first; what reads more sees it too."""

    OPEN = "when the bundle is opened"
    STAGE = "when the stage it is in is read, or the bundle is verified"
    LOAD = "when the stage it is in is loaded by the torch of this machine"
    VERIFY = "when the bundle is verified"


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One attack on stage 1: how it is made, and the error it must meet."""

    make: Callable[[BundleEditor], object]
    error: type[StagepackError]
    says: str
    seen: Seen
    file: str = ""  # the weight file that is attacked, if it is one

    def __str__(self) -> str:
        return self.says


def attacks(
    error: type[StagepackError], seen: Seen, *rows: tuple[Callable[[BundleEditor], object], str], file: str = ""
) -> list[Attack]:
    """Attacks that meet one kind of error, from pairs of how each is made and what the error says."""
    return [Attack(make=make, error=error, says=says, seen=seen, file=file) for make, says in rows]


def change_at(path: str, value: Any) -> Callable[[Any], None]:
    """A change that sets the field at a path, such as ``nodes/1/args``, of plain containers."""

    def change(fields: Any) -> None:
        *parents, last = [int(part) if part.isdecimal() else part for part in path.split("/")]
        for key in parents:
            fields = fields[key]
        fields[last] = value

    return change


def check(attack: Attack, editor: BundleEditor) -> None:
    """Make the attack; every road into the bundle must refuse it where it sees it, and work where it does not."""
    attack.make(editor)
    path = editor.path

    def refuses(road: Callable[[], object]) -> None:
        with pytest.raises(attack.error, match=attack.says) as caught:
            road()
        assert type(caught.value) is attack.error

    if attack.seen is Seen.OPEN:
        refuses(lambda: stagepack.open(path))
        command_fails("inspect", str(path), says=attack.says)
    else:
        stagepack.open(path)
    if attack.seen is Seen.LOAD:
        stagepack.open(path).verify()
    else:
        command_fails("verify", str(path), says=attack.says)
        if attack.seen is not Seen.OPEN:
            refuses(stagepack.open(path).verify)
    if attack.seen is Seen.VERIFY:
        stagepack.load(path)
        return
    command_fails("load", str(path), says=attack.says)
    command_fails("load", str(path), "--stage", "1", says=attack.says)
    for stage in STAGES:
        if stage != 1 and attack.seen is not Seen.OPEN:
            stagepack.load_stage(path, stage)
    # With all weights spoiled, their digests would tell first if any were read before this error.
    for file in path.glob("s*.safetensors"):
        if file.name != attack.file:
            editor.flip_bit(file.name, file.stat().st_size - 1)
    refuses(lambda: stagepack.load(path))
    refuses(lambda: stagepack.load_stage(path, 1))


def run(*arguments: str) -> Result:
    """Run the command in this process, whose logs, variables and garbage collector `serve` sets up for a server."""
    with contextlib.ExitStack() as patches:
        if arguments[0] == "serve":
            patches.enter_context(mock.patch("stagepack.cli.serve_command._set_up_process"))
            patches.enter_context(mock.patch("stagepack_serving.server.model_loading.BundleLoading._freeze_libraries"))
        return CliRunner().invoke(main, list(arguments))


def command_fails(*arguments: str, says: str = "") -> str:
    """Run a command that must end with status 1 and one line on standard error; return the line."""
    found = run(*arguments)
    assert found.exit_code == 1, found.output
    assert found.stderr.count("\n") == 1, found.stderr
    assert found.stderr.endswith("\n")
    assert found.stderr.startswith("stagepack: ")
    assert "Traceback" not in found.output
    assert "internal error" not in found.stderr
    assert found.stderr[:-1].isprintable()
    assert re.search(says, found.stderr), found.stderr
    return found.stderr


def answer(path: Path) -> dict[str, torch.Tensor]:
    """What a bundle of the tiny model answers to its example's input."""
    result: dict[str, torch.Tensor] = stagepack.load(path)(torch.arange(6).reshape(2, 3))
    return result
