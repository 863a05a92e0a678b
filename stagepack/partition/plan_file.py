"""A plan as a JSON file, which people may edit before they cut by it."""

import json
import os
from pathlib import Path

import msgspec

from stagepack.errors import CutError
from stagepack.format.codec import JSON_ERRORS
from stagepack.format.output_file import output_file
from stagepack.format.plan import Plan


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file.

    Args:
        path: a file that ``stagepack plan -o`` wrote. Only the `nodes` of each stage and `shared` matter when a model is cut by it.

    Returns:
        The plan, for the `plan` argument of `stagepack.export` and `stagepack.recut`.

    Raises:
        CutError: the file cannot be read, or is not a plan.

    Examples:
        ::

            plan = stagepack.read_plan("plan.json")
            stagepack.export(model, args, out="m.stagepack", plan=plan)
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Plan)
    except OSError as error:
        raise CutError(f"{path}: the plan cannot be read: {error.strerror}") from None
    except JSON_ERRORS as error:
        raise CutError(f"{path}: expected a plan, as written by 'stagepack plan --out': {error}") from None


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan file, with one line for each stage. A file of that name is replaced."""
    stages = ",\n  ".join(json.dumps(msgspec.to_builtins(stage)) for stage in plan.stages)
    json_text = f'{{\n "stages": [\n  {stages}\n ],\n "shared": {json.dumps(plan.shared)}\n}}\n'
    with output_file(path) as new_file:
        new_file.write_text(json_text)
