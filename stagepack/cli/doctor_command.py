"""`stagepack doctor`."""

import contextlib
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagepack.capture.source_path import check_source_path
from stagepack.cli.command import subcommand
from stagepack.cli.failures import shown_warnings
from stagepack.cli.machine_report import describe_machine
from stagepack.cli.output import print_json, print_line, print_table, progress
from stagepack.cli.run_options import json_option
from stagepack.errors import StagepackError

if TYPE_CHECKING:
    from stagepack.capture.diagnosis import CaptureAttempt, FailingModule
    from stagepack.capture.programs import Capture

_SHOWN_CHARACTERS = 220


@subcommand(
    "doctor",
    examples=[
        "stagepack doctor",
        "stagepack doctor net.py:make",
        "stagepack doctor ./folder",
        "stagepack doctor net.py:Net --inputs net.py:inputs",
        "stagepack doctor net.py:make --differential",
    ],
)
@click.argument("source", metavar="[SOURCE]", required=False)
@click.option(
    "--inputs",
    "inputs_function",
    metavar="FILE.py:FUNCTION",
    show_default="those that SOURCE returns",
    help="Function that returns the example inputs.",
)
@click.option(
    "--differential",
    is_flag=True,
    help="Compare the answers of the model, of its program, of bundles with 1, 2 and 3 stages, and of ONNX Runtime, at several sizes.",
)
@click.option("--processes", is_flag=True, help="With --differential: start a process for each stage, too.")
@json_option
def command(
    source: str | None, inputs_function: str | None, differential: bool, processes: bool, as_json: bool
) -> None:
    """Find out why a model cannot be exported, and what would work.

    Without SOURCE, the machine is described, for the report of a bug: versions, packages, devices, limits and the cache.

    Tries the ways to capture the model of SOURCE, which is as for 'stagepack export', and if none of the usual ones works, its modules one
    by one. A model that is captured is written into a temporary folder, loaded, and compared on its example. The code of SOURCE runs. The
    exit status is 1 if 'stagepack export' cannot write the model, or if --differential finds roads that disagree.
    """
    if processes and not differential:
        raise click.UsageError("--processes requires --differential")
    if source is None:
        if differential:
            raise click.UsageError("--differential is for a SOURCE")
        describe_machine(as_json=as_json)
        return
    check_source_path(source)
    # The output of the model's own code goes to standard error: standard output is for our facts alone.
    with progress("importing torch") as next_step, contextlib.redirect_stdout(sys.stderr):
        from stagepack.capture.advice import capture_advice  # noqa: PLC0415 - with torch
        from stagepack.capture.diagnosis import DRAFT, WRITE, find_failing_modules, try_export  # noqa: PLC0415 - torch, slow to import
        from stagepack.capture.source_argument import load_source_argument  # noqa: PLC0415 - the same

        model, inputs = load_source_argument(source, inputs_function)
        attempts: list[CaptureAttempt] = []
        failing: list[FailingModule] = []
        captures: list[Capture] = []
        disagreeing: list[str] = []
        with shown_warnings(), tempfile.TemporaryDirectory() as folder:
            for attempt in try_export(model, inputs, lambda capture: _write(capture, Path(folder), captures)):
                attempts.append(attempt)
                next_step(f"tried: {attempt.way}")
            if differential and captures:
                next_step("comparing roads")
                disagreeing = _disagreements(captures[0], Path(folder), processes=processes)
        if attempts[0].error is None and attempts[-1].way != WRITE:
            next_step("trying the modules")
            failing = find_failing_modules(model, inputs)
    errors = [*(attempt.error or "" for attempt in attempts), *(module.error for module in failing)]
    draft_fails = any(attempt.way == DRAFT and not attempt.has_program for attempt in attempts)
    advice = capture_advice(errors, draft_fails=draft_fails)
    if as_json:
        facts = {
            "source": source,
            "attempts": [*map(asdict, attempts)],
            "modules": [*map(asdict, failing)],
            "advice": advice,
        }
        print_json(facts | ({"disagreements": disagreeing} if differential else {}))
    else:
        _print_diagnosis(attempts, failing)
        for sentence in advice:
            print_line(f"has worked: {sentence}")
        for line in disagreeing:
            print_line(f"disagrees: {line}")
    is_written = attempts[-1].way == WRITE and attempts[-1].error is None
    sys.exit(0 if is_written and not disagreeing else 1)


def _disagreements(capture: "Capture", folder: Path, *, processes: bool) -> list[str]:
    """What the roads of a captured model answer differently, or why they cannot be compared."""
    from stagepack.cli.differential import disagreements  # noqa: PLC0415 - with torch

    try:
        return list(disagreements(capture, folder, processes=processes))
    except StagepackError as error:
        return [f"the roads cannot be compared: {error}"]


def _write(capture: "Capture", folder: Path, captures: "list[Capture]") -> None:
    """Keep a capture, and write a bundle that is removed afterwards: what loaders refuse is an error."""
    from stagepack.exporter import export_capture  # noqa: PLC0415 - with torch
    from stagepack.partition.cut_options import CutOptions  # noqa: PLC0415 - the same

    captures.append(capture)
    export_capture(capture, out=folder / "tried.stagepack", cut_options=CutOptions())


def _print_diagnosis(attempts: "list[CaptureAttempt]", failing: "list[FailingModule]") -> None:
    rows = [
        [attempt.way, f"{attempt.seconds:.1f} s", "works" if attempt.error is None else _shortened(attempt.error)]
        for attempt in attempts
    ]
    print_table("ways to capture the model", ["way", "#time", "result"], rows)
    if failing:
        module_rows: list[Any] = [
            [module.path or "the model itself", module.type, _shortened(module.error)] for module in failing
        ]
        print_table("modules that cannot be captured", ["module", "class", "reason"], module_rows)
    for attempt in attempts:
        if attempt.error is None and attempt.advice:
            print_line(f"{attempt.way} works: {attempt.advice}")


def _shortened(reason: str) -> str:
    """The beginning of a reason, and its end, which has the line of code."""
    if len(reason) <= _SHOWN_CHARACTERS:
        return reason
    location = reason[reason.rfind(" (") :] if reason.endswith(")") else ""
    return f"{reason[: _SHOWN_CHARACTERS - len(location)]} ...{location[-_SHOWN_CHARACTERS:]}"
