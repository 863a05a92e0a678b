"""`stagepack load`."""

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import click

from stagepack.cli.output import (
    fail,
    finite,
    import_modules,
    print_json,
    print_line,
    print_table,
    progress,
    reports_errors,
)
from stagepack.cli.phase_timer import PhaseTimer
from stagepack.cli.quantities import format_bytes
from stagepack.cli.run_options import chosen, operator_options, runtime_option
from stagepack.format.manifest import Stage
from stagepack.format.reader import Bundle


@click.command("load")
@click.argument("bundle", type=click.Path())
@click.option("--stage", "number", type=int, help="Load this stage alone.")
@click.option("--device", "devices", multiple=True, help="A device a stage in order, or fewer. Default: cpu.")
@click.option("--inputs", type=click.Path(path_type=Path), help="A safetensors file with the inputs by edge name.")
@click.option("--outputs", type=click.Path(path_type=Path), help="The safetensors file to write the results to.")
@runtime_option
@operator_options
@click.option(
    "--compile",
    "how",
    is_flag=False,
    flag_value="regions",
    type=click.Choice(["regions", "whole"]),
    help="Compile at the first call: each distinct region once, or each stage as a whole.",
)
@click.option(
    "--compiled", type=click.Path(), help="Run the native code in this folder, which stagepack compile wrote."
)
@click.option("--no-verify", is_flag=True, help="Do not compare the weight files with their digests.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def command(
    bundle: str,
    number: int | None,
    devices: tuple[str, ...],
    inputs: Path | None,
    outputs: Path | None,
    runtimes: tuple[str, ...],
    allow_ops: tuple[str, ...],
    imports: tuple[str, ...],
    how: str | None,
    compiled: str | None,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Load BUNDLE, say what was read, and run its example, or the inputs of a file."""
    phases = PhaseTimer()
    opened = Bundle(bundle)
    phases.end("open")
    if number is not None and not 0 <= number < len(opened.stages):
        fail(f"--stage: expected 0 to {len(opened.stages) - 1}, found {number}")
    if number is not None and (inputs or outputs):
        raise click.UsageError("--inputs and --outputs run the whole pipeline: leave out --stage")
    if number is not None and len(devices) > 1:
        raise click.UsageError("--stage loads one stage: name one device")
    if how and compiled:
        raise click.UsageError("--compile and --compiled exclude each other")
    kinds = chosen(runtimes, 1 if number is not None else len(opened.stages))
    if (how or compiled) and "onnxruntime" in kinds:
        raise click.UsageError("--compile and --compiled are for stages in torch: leave out --runtime")
    if outputs and inputs is None and opened.example is None:
        fail(f"--outputs: {bundle} has no example to run: pass --inputs")
    import_modules(imports)
    speed = (how or False, compiled)
    rows, pipeline = _load(opened, number, kinds, list(devices) or ["cpu"], allow_ops, not no_verify, speed, phases)
    facts: dict[str, Any] = {"bundle": bundle, "stages": rows}
    if pipeline is not None:
        facts |= _run(opened, pipeline, inputs, outputs, phases)
    facts["start"] = phases.seconds
    if as_json:
        print_json(facts | ({"difference": finite(facts["difference"])} if "difference" in facts else {}))
        return
    table = [
        [
            str(row["stage"]),
            row["runtime"],
            row["device"],
            format_bytes(row["bytes_read"]),
            f"{row['seconds']:.3f} s",
            " ".join(row["files"]),
        ]
        for row in rows
    ]
    print_table("loaded", ["#stage", "runtime", "device", "#read", "#time", "files"], table)
    if "difference" in facts:
        print_line(f"example: {facts['outputs']} outputs, largest difference {facts['difference']:g}")
    elif inputs is not None:
        print_line(f"{inputs}: {facts['outputs']} outputs")
    goal = "first answer" if "first call" in phases.seconds else "loaded"
    parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in phases.seconds.items())
    print_line(f"{goal} after {sum(phases.seconds.values()):.3f} s: {parts}")
    if outputs:
        print_line(f"wrote {outputs}")


def _load(
    bundle: Bundle,
    number: int | None,
    kinds: list[Any],
    devices: list[str],
    allow_ops: tuple[str, ...],
    verify: bool,
    speed: tuple[Any, str | None],
    phases: PhaseTimer,
) -> tuple[list[dict[str, Any]], Any]:
    """Load the stages; return a row of facts for each, and the pipeline when it is whole."""
    for kind in dict.fromkeys(kinds):
        importlib.import_module(f"stagepack_loaders.{kind}.stage")
        importlib.import_module("stagepack_loaders.load")
        phases.end(f"import {kind}")
    from stagepack_loaders.load import assemble, prepare, prepare_stages, speed_up  # noqa: PLC0415 - after the arguments are checked

    rows: list[dict[str, Any]] = []
    stages = []
    with progress("load"):
        if number is None:
            prepared = prepare_stages(bundle, devices, runtime=kinds, allow_ops=allow_ops)
        else:
            prepared = list(prepare(bundle, {number: devices[0]}, kinds[0], allow_ops=allow_ops).values())
        phases.end("graphs")
        ready = speed_up(bundle, prepared, *speed)
        if any(speed):
            phases.end("compile")
        started = time.perf_counter()
        for index, one in enumerate(ready, start=number or 0):
            stage = one.finish(verify=verify)
            files = _files(bundle.stages[index], stage.runtime)
            rows.append(
                {
                    "stage": index,
                    "runtime": stage.runtime,
                    "device": str(stage.device),
                    "files": files,
                    "bytes_read": sum(bundle.files[name].size for name in files),
                    "seconds": round(time.perf_counter() - started, 6),
                }
            )
            stages.append(stage)
            started = time.perf_counter()
    phases.end("weights")
    return rows, None if number is not None else assemble(bundle, stages)


def _files(stage: Stage, runtime: str) -> list[str]:
    """The files that a runtime reads of a stage."""
    if runtime == "onnxruntime" and stage.onnx is not None:
        return [stage.onnx.model, *stage.weights, *stage.onnx.weights]
    return [stage.graph, *stage.weights]


def _run(
    bundle: Bundle, pipeline: Any, inputs: Path | None, outputs: Path | None, phases: PhaseTimer
) -> dict[str, Any]:
    """Run the inputs of a file, or the example; return facts about the result."""
    from stagepack_loaders import example  # noqa: PLC0415 - after the arguments are checked

    if inputs is None and bundle.example is None:
        return {}
    with progress("run"):
        if inputs is None:
            given, expected = example.read_example(pipeline, bundle)
        else:
            given, expected = example.read_inputs(pipeline, inputs), {}
        phases.end("inputs")
        compiled_before = _compile_seconds()
        results = example.run_on_inputs(pipeline, given)
        phases.end("first call")
        phases.reassign("first call", "compile", _compile_seconds() - compiled_before)
        if outputs is not None:
            example.write_outputs(pipeline, results, outputs)
    facts: dict[str, Any] = {"outputs": len(results)}
    return facts if inputs is not None else facts | {"difference": example.compare(pipeline, results, expected).largest}


def _compile_seconds() -> float:
    """How long torch's compiler has worked in this process, in seconds."""
    if "torch" not in sys.modules:
        return 0.0
    from stagepack_loaders.torch.compile import compile_seconds  # noqa: PLC0415 - torch is there already

    return compile_seconds()
