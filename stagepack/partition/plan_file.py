"""A plan as a file: JSON that people edit and give back."""

import json
import os
from pathlib import Path

import msgspec

from stagepack.errors import CutError, WriteError
from stagepack.format.plan import Plan


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan; of each stage, its `nodes` count and nothing else.

    Raises:
        CutError: the file is not there, or holds no plan.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Plan)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CutError(f"{path}: expected a plan, as `stagepack plan -o` writes it: {error}") from None


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan, one stage a line.

    Raises:
        WriteError: the file cannot be written.
    """
    stages = ",\n  ".join(json.dumps(msgspec.to_builtins(stage)) for stage in plan.stages)
    json_text = f'{{\n "stages": [\n  {stages}\n ],\n "shared": {json.dumps(plan.shared)}\n}}\n'
    try:
        Path(path).write_text(json_text)
    except OSError as error:
        raise WriteError(f"{path}: could not be written: {error}") from None
