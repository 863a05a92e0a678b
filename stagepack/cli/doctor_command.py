"""`stagepack doctor`."""

import contextlib
import itertools
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stagepack.capture.transformers.model_folders import check_source_path
from stagepack.cli.command import Amount, argument, flag, only_with, option_object, subcommand
from stagepack.cli.failures import shown_warnings
from stagepack.cli.machine_report import describe_machine
from stagepack.cli.output import print_json, print_line, print_rows, progress
from stagepack.cli.shared_flags import JSON, ExampleFlags

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stagepack.capture.diagnosis import CaptureAttempt, FailingModule
    from stagepack.capture.inputs import Inputs
    from stagepack.capture.programs import Capture

_SHOWN_CHARACTERS = 220
# Least widths of the columns where rows are printed one by one: a name, a time or a class, and a text.
_LEAST_WIDTHS = (26, 7, 2 * _SHOWN_CHARACTERS)
_Row = TypeVar("_Row")


@option_object
class _Options:
    source: str | None = argument("[SOURCE]", required=False)
    example: ExampleFlags
    seconds: float = only_with(
        flag(
            "--time-limit SECONDS",
            "Stop a way to capture the model, and the search through its modules, after so many seconds.",
            type=Amount(1),
            default=120,
        ),
        "SOURCE",
    )
    as_json: bool = JSON


@subcommand(
    "doctor",
    examples=[
        "stagepack doctor",
        "stagepack doctor net.py:make",
        "stagepack doctor ./folder",
        "stagepack doctor net.py:Net --inputs net.py:inputs",
        "stagepack doctor net.py:make --time-limit 600",
    ],
)
def command(options: _Options) -> None:
    """Find out why a model cannot be exported, and what would work.

    Without SOURCE, the machine is described, for the report of a bug: versions, packages, devices, limits and the cache.

    Tries the ways to capture the model of SOURCE, or each of its entry points. SOURCE is written as for 'stagepack export'. If all usual
    ways fail, the modules of the model are tried one by one. A captured model is written into a temporary folder, loaded, and compared on
    its example. Each result is printed at once, and stays after Ctrl-C. The command runs the code of SOURCE. The exit status is 1 if
    'stagepack export' cannot write the model.
    """
    source = options.source
    if source is None:
        if options.example.is_used:
            raise click.UsageError(f"{ExampleFlags.NAMES} are for a SOURCE")
        describe_machine(as_json=options.as_json)
        return
    check_source_path(source)
    # The output of the model's own code goes to standard error: standard output is for our facts alone.
    with progress("importing torch"), contextlib.redirect_stdout(sys.stderr):
        from stagepack.capture.source import ModelSource  # noqa: PLC0415 - torch, slow to import

        functions = ModelSource.of(source).functions(options.example.example())
    diagnoses: dict[str, _Diagnosis] = {}
    try:
        for name, (model, inputs) in functions.items():
            diagnosis = diagnoses[name] = _Diagnosis()
            if len(functions) > 1 and not options.as_json:
                print_line(f"entry point {name}")
            _diagnose(diagnosis, model, inputs, options)
    except KeyboardInterrupt:
        if options.as_json:
            print_json(_facts(source, diagnoses) | {"interrupted": True})
        raise
    if options.as_json:
        print_json(_facts(source, diagnoses))
    sys.exit(0 if all(diagnosis.is_fine for diagnosis in diagnoses.values()) else 1)


@dataclass(kw_only=True)
class _Diagnosis:
    """What was found about one entry point."""

    attempts: "list[CaptureAttempt]" = field(default_factory=list)
    failing: "list[FailingModule]" = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    is_fine: bool = False


def _diagnose(diagnosis: _Diagnosis, model: Any, inputs: "Inputs", options: _Options) -> None:
    """Try the ways to capture a module or to write a program, and then its modules; print what is found when it is found."""
    from torch.export import ExportedProgram  # noqa: PLC0415 - slow to import

    from stagepack.capture.diagnosis import DRAFT, WRITE, find_failing_modules, try_export, try_program  # noqa: PLC0415 - the same
    from stagepack.capture.programs import capture_program  # noqa: PLC0415 - the same
    from stagepack.capture.torch_messages import capture_advice  # noqa: PLC0415 - the same

    with tempfile.TemporaryDirectory() as folder:
        write = partial(_write, folder=Path(folder))
        if isinstance(model, ExportedProgram):
            attempts = try_program(capture_program(model, inputs), write, options.seconds)
        else:
            attempts = try_export(model, inputs, write, options.seconds)
        _show_attempts(_each(attempts, "trying ways to capture the model", diagnosis.attempts), options)
    last_attempt = diagnosis.attempts[-1]
    if diagnosis.attempts[0].error is None and last_attempt.way != WRITE:
        failing = find_failing_modules(model, inputs, options.seconds)
        _show_modules(_each(failing, "trying the modules", diagnosis.failing), options)
    errors = [attempt.error or "" for attempt in diagnosis.attempts]
    draft_fails = any(attempt.way == DRAFT and not attempt.has_program for attempt in diagnosis.attempts)
    diagnosis.advice = capture_advice(
        [*errors, *(module.error for module in diagnosis.failing)], draft_fails=draft_fails
    )
    diagnosis.is_fine = last_attempt.way == WRITE and last_attempt.error is None
    if not options.as_json:
        _print_advice(diagnosis)


@contextlib.contextmanager
def _quiet(step: str) -> "Iterator[None]":
    """Keep what the model's own code prints from standard output."""
    with progress(step), contextlib.redirect_stdout(sys.stderr), shown_warnings():
        yield


def _each(row_iterator: "Iterator[_Row]", step: str, rows: "list[_Row]") -> "Iterator[_Row]":
    """Yield rows when they are found, and keep them."""
    while True:
        with _quiet(step):
            row = next(row_iterator, None)
        if row is None:
            return
        rows.append(row)
        yield row


def _facts(source: str, diagnoses: "dict[str, _Diagnosis]") -> dict[str, Any]:
    facts = {
        name: {
            "attempts": [*map(asdict, diagnosis.attempts)],
            "modules": [*map(asdict, diagnosis.failing)],
            "advice": diagnosis.advice,
        }
        for name, diagnosis in diagnoses.items()
    }
    return {"source": source} | (next(iter(facts.values())) if len(facts) == 1 else {"entry_points": facts})


def _write(capture: "Capture", *, folder: Path) -> None:
    """Write a bundle that is removed afterwards: what loaders refuse is an error."""
    from stagepack.partition.cut_options import CutOptions  # noqa: PLC0415 - the same
    from stagepack.roads.capture_writer import export_capture  # noqa: PLC0415 - with torch

    export_capture(capture, out=folder / "tried.stagepack", cut_options=CutOptions())


def _show_attempts(attempts: "Iterator[CaptureAttempt]", options: _Options) -> None:
    rows = (
        [attempt.way, f"{attempt.seconds:.1f} s", "works" if attempt.error is None else _shortened(attempt.error)]
        for attempt in attempts
    )
    _show_rows("ways to capture the model", ["way", "#time", "result"], rows, options)


def _show_modules(modules: "Iterator[FailingModule]", options: _Options) -> None:
    rows = ([module.path or "the model itself", module.type, _shortened(module.error)] for module in modules)
    first = next(rows, None)
    if first is not None:
        title = "modules that cannot be captured"
        _show_rows(title, ["module", "class", "reason"], itertools.chain([first], rows), options)


def _show_rows(title: str, column_names: list[str], rows: "Iterable[list[str]]", options: _Options) -> None:
    """Print rows when they come; with --json they are only waited for."""
    if options.as_json:
        for _ in rows:
            pass
    else:
        print_rows(title, column_names, rows, _LEAST_WIDTHS)


def _print_advice(diagnosis: _Diagnosis) -> None:
    for attempt in diagnosis.attempts:
        if attempt.error is None and attempt.advice:
            print_line(f"{attempt.way} works: {attempt.advice}")
    for sentence in diagnosis.advice:
        print_line(f"has worked: {sentence}")


def _shortened(reason: str) -> str:
    """The beginning of a reason, and its end, which has the line of code."""
    if len(reason) <= _SHOWN_CHARACTERS:
        return reason
    location = reason[reason.rfind(" (") :] if reason.endswith(")") else ""
    return f"{reason[: _SHOWN_CHARACTERS - len(location)]} ...{location[-_SHOWN_CHARACTERS:]}"
