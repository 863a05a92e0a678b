"""`stagepack doctor`."""

import contextlib
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagepack.capture.model_folders import check_source_path
from stagepack.cli.command import argument, flag, option_object, subcommand
from stagepack.cli.failures import shown_warnings
from stagepack.cli.machine_report import describe_machine
from stagepack.cli.output import print_json, print_line, print_table, progress
from stagepack.cli.shared_flags import JSON, ExampleFlags
from stagepack.errors import StagepackError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stagepack.capture.diagnosis import CaptureAttempt, FailingModule
    from stagepack.capture.inputs import Inputs
    from stagepack.capture.programs import Capture

_SHOWN_CHARACTERS = 220


@option_object
class _Options:
    source: str | None = argument("[SOURCE]", required=False)
    example: ExampleFlags
    differential: bool = flag(
        "--differential",
        "Compare the answers of the model, of its program, of bundles with 1, 2 and 3 stages, and of ONNX Runtime, at several sizes.",
    )
    processes: bool = flag("--processes", "With --differential: start a process for each stage, too.")
    as_json: bool = JSON


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
def command(options: _Options) -> None:
    """Find out why a model cannot be exported, and what would work.

    Without SOURCE, the machine is described, for the report of a bug: versions, packages, devices, limits and the cache.

    Tries the ways to capture the model of SOURCE, which is as for 'stagepack export', or each of its entry points, and if none of the
    usual ones works, its modules one by one. A model that is captured is written into a temporary folder, loaded, and compared on its
    example. The code of SOURCE runs. The exit status is 1 if 'stagepack export' cannot write the model, or if --differential finds roads
    that disagree.
    """
    source, differential = options.source, options.differential
    if options.processes and not differential:
        raise click.UsageError("--processes requires --differential")
    if source is None:
        if differential or options.example.is_used:
            raise click.UsageError(f"--differential, {ExampleFlags.NAMES} are for a SOURCE")
        describe_machine(as_json=options.as_json)
        return
    check_source_path(source)
    # The output of the model's own code goes to standard error: standard output is for our facts alone.
    with progress("importing torch") as next_step, contextlib.redirect_stdout(sys.stderr):
        from stagepack.capture.source import load_functions  # noqa: PLC0415 - torch, slow to import

        functions = load_functions(source, options.example.example_arguments())
        with shown_warnings():
            diagnoses = {
                name: _diagnose(model, inputs, next_step, options) for name, (model, inputs) in functions.items()
            }
    facts = {name: _facts(diagnosis) for name, diagnosis in diagnoses.items()}
    if differential:
        facts = {name: of_name | {"disagreements": diagnoses[name].disagreeing} for name, of_name in facts.items()}
    if options.as_json:
        single = next(iter(facts.values())) if len(facts) == 1 else {"entry_points": facts}
        print_json({"source": source} | single)
    else:
        for name, diagnosis in diagnoses.items():
            if len(diagnoses) > 1:
                print_line(f"entry point {name}")
            _print_diagnosis(diagnosis.attempts, diagnosis.failing)
            for sentence in diagnosis.advice:
                print_line(f"has worked: {sentence}")
            for line in diagnosis.disagreeing:
                print_line(f"disagrees: {line}")
    sys.exit(0 if all(diagnosis.is_fine for diagnosis in diagnoses.values()) else 1)


@dataclass(kw_only=True)
class _Diagnosis:
    """What was found about one entry point."""

    attempts: "list[CaptureAttempt]" = field(default_factory=list)
    failing: "list[FailingModule]" = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    disagreeing: list[str] = field(default_factory=list)
    is_fine: bool = False


def _diagnose(model: Any, inputs: "Inputs", next_step: "Callable[[str], None]", options: _Options) -> _Diagnosis:
    """Try the ways to capture a module or to write a program, and then its modules."""
    from torch.export import ExportedProgram  # noqa: PLC0415 - slow to import

    from stagepack.capture.diagnosis import DRAFT, WRITE, find_failing_modules, try_export, try_program  # noqa: PLC0415 - the same
    from stagepack.capture.programs import capture_program  # noqa: PLC0415 - the same
    from stagepack.capture.torch_messages import capture_advice  # noqa: PLC0415 - the same

    diagnosis = _Diagnosis()
    captures: list[Capture] = []
    with tempfile.TemporaryDirectory() as folder:
        write = partial(_write, folder=Path(folder), captures=captures)
        if isinstance(model, ExportedProgram):
            attempts = try_program(capture_program(model, inputs), write)
        else:
            attempts = try_export(model, inputs, write)
        for attempt in attempts:
            diagnosis.attempts.append(attempt)
            next_step(f"tried: {attempt.way}")
        if options.differential and captures:
            next_step("comparing roads")
            diagnosis.disagreeing = _disagreements(captures[0], Path(folder), processes=options.processes)
    last_attempt = diagnosis.attempts[-1]
    if diagnosis.attempts[0].error is None and last_attempt.way != WRITE:
        next_step("trying the modules")
        diagnosis.failing = find_failing_modules(model, inputs)
    errors = [attempt.error or "" for attempt in diagnosis.attempts]
    draft_fails = any(attempt.way == DRAFT and not attempt.has_program for attempt in diagnosis.attempts)
    diagnosis.advice = capture_advice(
        [*errors, *(module.error for module in diagnosis.failing)], draft_fails=draft_fails
    )
    diagnosis.is_fine = last_attempt.way == WRITE and last_attempt.error is None and not diagnosis.disagreeing
    return diagnosis


def _facts(diagnosis: _Diagnosis) -> dict[str, Any]:
    return {
        "attempts": [*map(asdict, diagnosis.attempts)],
        "modules": [*map(asdict, diagnosis.failing)],
        "advice": diagnosis.advice,
    }


def _disagreements(capture: "Capture", folder: Path, *, processes: bool) -> list[str]:
    """What the roads of a captured model answer differently, or why they cannot be compared."""
    from stagepack.cli.differential import disagreements  # noqa: PLC0415 - with torch

    try:
        return list(disagreements(capture, folder, processes=processes))
    except StagepackError as error:
        return [f"the roads cannot be compared: {error}"]


def _write(capture: "Capture", *, folder: Path, captures: "list[Capture]") -> None:
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
