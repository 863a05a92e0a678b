"""What users do with a bundle, for bundles that are not what they seem: each action ends in order or with a typed error.

The actions run in a process apart, with bounds on time and memory, so that its end by a signal is seen.
"""

import contextlib
import io
import json
import os
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch

import stagepack
from stagepack.cli import main
from stagepack.errors import StagepackError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.reader import Bundle
from stagepack.format.shapes import evaluate_dim
from stagepack_loaders.example import read_example_inputs
from stagepack_loaders.torch.arrays import TORCH_ARRAYS
from tests.fuzz.roads import RoadsDifferError, compare_roads

# Of processor time.
SECONDS = 20
COMPILE_SECONDS = 120
MEMORY_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Outcome:
    """How an action ended.

    Attributes:
        kind: ``ok``, ``refused`` (a typed error), ``exception`` (any other), ``value`` (a value of another type or shape than stated),
            ``lie`` (two roads that do not answer alike), ``signal``, ``hang``, ``memory``.
        detail: the message, with the innermost line of code for an exception.
    """

    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Case:
    """A bundle to act on.

    Attributes:
        path: its folder.
        original: the bundle before it was changed.
        inputs: inputs of a call that the original takes, by entry point.
    """

    path: Path
    original: Path
    inputs: Mapping[str, dict[str, Any]] = field(default_factory=dict)


class ValueDiffers(Exception):  # noqa: N818 - it is the finding, not an error of ours
    """A value is not of the type or shape that the bundle states."""


def command(*arguments: str) -> Callable[[Case, Path], None]:
    """Return the action of a subcommand. ``{bundle}``, ``{original}`` and ``{out}`` stand for folders."""

    def act(case: Case, scratch: Path) -> None:
        texts = {"bundle": case.path, "original": case.original, "out": scratch / "out"}
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), contextlib.suppress(SystemExit):
            try:
                main.main([argument.format(**texts) for argument in arguments], standalone_mode=False)
            except click.ClickException as failure:
                raise failure.__cause__ or failure from None

    return act


def call(case: Case, _: Path) -> None:
    """Load each entry point, and run it stage by stage."""
    bundle = stagepack.open(case.path)
    for entry_point in bundle.entry_points:
        selected = bundle.select(entry_point.name)
        pipeline = stagepack.load(selected)
        _run_stages(selected, pipeline.run_stage, case.inputs.get(entry_point.name))


def call_with_modules(case: Case, _: Path) -> None:
    """Load each stage of each entry point with the modules of the model, and run it."""
    bundle = stagepack.open(case.path)
    for entry_point in bundle.entry_points:
        selected = bundle.select(entry_point.name)
        stages = [stagepack.load_stage(selected, number, modules=True) for number in range(len(selected.stages))]

        def run_stage(stage_number: int, values: dict[str, Any]) -> None:
            stage_entry = selected.stages[stage_number]  # noqa: B023 - called in this round
            outputs = stages[stage_number](*(values[edge_name] for edge_name in stage_entry.inputs))  # noqa: B023
            values.update(zip(stage_entry.outputs, outputs, strict=True))

        _run_stages(selected, run_stage, case.inputs.get(entry_point.name))


def _run_stages(
    bundle: Bundle, run_stage: Callable[[int, dict[str, Any]], None], inputs: dict[str, Any] | None
) -> None:
    """Run the stages of an entry point on inputs; if it was renamed, and so has none, on those of the example."""
    values = read_example_inputs(bundle, TORCH_ARRAYS) if inputs is None else dict(inputs)
    bound = {name: BoundArgument(name, value) for name, value in values.items()}
    sizes = dict(check_values(bundle.entry_point.inputs, bound, bundle.entry_point.symbols))
    with torch.no_grad():
        for stage_number, stage in enumerate(bundle.stages):
            run_stage(stage_number, values)
            for edge in bundle.edges:
                if edge.name in stage.outputs and edge.name in values:
                    _check_value(edge, values[edge.name], sizes)


def _check_value(edge: Any, value: Any, sizes: dict[str, int]) -> None:
    if edge.dtype.startswith("sym"):
        expected = {"symint": int, "symfloat": float, "symbool": bool}[edge.dtype]
        if type(value) is not expected:
            raise ValueDiffers(f"{edge.name}: expected {expected.__name__}, found {type(value).__name__}")
        return
    if not isinstance(value, torch.Tensor):
        raise ValueDiffers(f"{edge.name}: expected a tensor, found {type(value).__name__}")
    if str(value.dtype).removeprefix("torch.") != edge.dtype:
        raise ValueDiffers(f"{edge.name}: expected {edge.dtype}, found {value.dtype}")
    try:
        expected_shape = tuple(evaluate_dim(dim, sizes) for dim in edge.shape)
    except (KeyError, StagepackError):
        return  # a size that depends on data
    if tuple(value.shape) != expected_shape:
        raise ValueDiffers(f"{edge.name}: expected {expected_shape}, found {tuple(value.shape)}")


ACTIONS: dict[str, Callable[[Case, Path], None]] = {
    "verify": command("verify", "{bundle}"),
    "verify --run": command("verify", "{bundle}", "--run"),
    "inspect --graph": command("inspect", "{bundle}", "--graph"),
    "inspect --json": command("inspect", "{bundle}", "--json"),
    "plan": command("plan", "{bundle}"),
    "plan --stages": command("plan", "{bundle}", "--stages", "2"),
    "plan --profile": command("plan", "{bundle}", "--stages", "2", "--profile", "h100", "--shared", "transmit"),
    "report": command("report", "{bundle}", "-o", "{out}.html"),
    "report --profile": command("report", "{bundle}", "-o", "{out}.html", "--profile", "h100"),
    "roads": lambda case, scratch: compare_roads(case.path, case.original, case.inputs, scratch),
    "recut": command("recut", "{bundle}", "--stages", "2", "-o", "{out}"),
    "recut --stages 1": command("recut", "{bundle}", "--stages", "1", "-o", "{out}"),
    "diff": command("diff", "{bundle}", "{original}"),
    "diff of the original": command("diff", "{original}", "{bundle}"),
    "pull": command("pull", "file://{bundle}", "-o", "{out}"),
    "triton": command("triton", "{bundle}", "-o", "{out}"),
    "k8s": command("k8s", "{bundle}", "-o", "{out}.yaml"),
    "profile": command("profile", "{bundle}", "-o", "{out}.json"),
    "load": command("load", "{bundle}"),
    "load --stream": command("load", "{bundle}", "--stream"),
    "load --device-memory": command("load", "{bundle}", "--device-memory", "8KiB"),
    "load --verify off": command("load", "{bundle}", "--verify", "off", "--copy"),
    "load --runtime onnxruntime": command("load", "{bundle}", "--runtime", "onnxruntime"),
    "call": call,
    "call with modules": call_with_modules,
    "compile": command("compile", "{bundle}", "-o", "{out}"),
    "onnx": command("onnx", "{bundle}"),  # last: it writes into the bundle
}


def run_apart(actions: Mapping[str, Callable[[Case, Path], None]], case: Case) -> Iterator[tuple[str, Outcome]]:
    """Run actions one after the other in a forked process, and yield how each ended. After one that ends the process comes another process.

    The caller must not have run any operator of torch in several threads before.
    """
    names = list(actions)
    while names:
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            _run_in_child({name: actions[name] for name in names}, case, write_end)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            outcomes = [Outcome(*json.loads(line)) for line in pipe]
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            kind = "hang" if number in (signal.SIGPROF, signal.SIGALRM) else "signal"
            outcomes.append(Outcome(kind, signal.Signals(number).name))
        elif len(outcomes) < len(names):
            outcomes.append(Outcome("signal", f"ended with status {os.waitstatus_to_exitcode(status)}"))
        yield from zip(names, outcomes, strict=False)
        names = names[len(outcomes) :]


def _run_in_child(actions: Mapping[str, Callable[[Case, Path], None]], case: Case, write_end: int) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = mapped_bytes + 2 * MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for name, action in actions.items():
        seconds = COMPILE_SECONDS if name == "compile" else SECONDS
        # On a busy machine, a process waits for processors.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.alarm(10 * seconds)
        outcome = _run_action(action, case)
        os.write(write_end, json.dumps([outcome.kind, outcome.detail]).encode() + b"\n")
    os._exit(0)


def _run_action(action: Callable[[Case, Path], None], case: Case) -> Outcome:
    peak_before = _peak_bytes()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            action(case, Path(scratch))
    except ValueDiffers as error:
        return Outcome("value", str(error))
    except RoadsDifferError as error:
        return Outcome("lie", str(error))
    except StagepackError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}")
    except click.ClickException as error:
        return Outcome("refused", error.message)
    except BaseException as error:  # noqa: BLE001 - it is the finding
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return Outcome("exception", f"{type(error).__name__}: {str(error)[:200]} ({place})")
    if _peak_bytes() > max(peak_before, MEMORY_BYTES):
        return Outcome("memory", f"{_peak_bytes() / 2**30:.1f} GiB")
    return Outcome("ok")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
