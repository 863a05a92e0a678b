"""`stagepack load`."""

import contextlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import click
from msgspec import structs

from stagepack.cli.command import flag, flag_of, flags_of, only_with, option_object, subcommand
from stagepack.cli.failures import fail
from stagepack.cli.output import count_of, counted_progress, finite, print_json, print_line, print_table, progress
from stagepack.cli.phase_timer import PhaseTimer
from stagepack.cli.run_options import (
    COMPILED,
    DEVICES,
    INPUTS_FILE,
    PLACEMENT,
    PROCESSES,
    RUNTIMES,
    VERIFY,
    check_arriving,
    check_runtimes_compile,
    runtime_name_of_each_stage,
    verified_text,
)
from stagepack.cli.run_tracing import print_trace, trace_requests
from stagepack.cli.shared_flags import (
    ALLOW_OPS,
    ATOL,
    DELTAS,
    IMPORTS,
    JSON,
    RTOL,
    SIGNATURE,
    BundleOptions,
    check_stage_number,
    given_trusted_files,
    open_argument,
)
from stagepack.format.output_file import check_output_file
from stagepack.format.quantities import format_bytes
from stagepack.format.reader import Bundle
from stagepack.named_adapters import pinned_adapters, with_adapters
from stagepack_loaders.call_limits import Limits
from stagepack_loaders.comparison import Difference, Tolerance, check_example_difference, format_difference
from stagepack_loaders.distributed.launch_environment import is_launched_group
from stagepack_loaders.options import (
    AUTO,
    DEFAULT_IN_FLIGHT,
    LoadOptions,
    PlacementOptions,
    ProcessOptions,
    Verify,
    WeightOptions,
)
from stagepack_loaders.registry import find_runtime, import_runtime
from stagepack_loaders.window_plan import Residency

if TYPE_CHECKING:
    from stagepack.format.chunk_reads import ByteProgress
    from stagepack_loaders.base import LoadedStage
    from stagepack_loaders.pipeline import CallablePipeline
    from stagepack_loaders.torch.stage import TorchStage

_MOST_REQUESTS, _DEFAULT_REQUESTS = 10_000, 8
_MOST_FILES: Final = 6  # of a stage, named


@option_object
class _Options(BundleOptions):
    stage_number: int | None = flag("--stage N", "Load only stage N, from 0, and run nothing.", default_text="all")
    delta_paths: tuple[str, ...] = DELTAS
    devices: tuple[str, ...] = DEVICES
    placement: PlacementOptions = PLACEMENT
    inputs_file: Path | None = INPUTS_FILE
    outputs_file: Path | None = flag(
        "--outputs FILE",
        "Write the results to this safetensors file, as output.0, output.1 and so on.",
        default_text="not written",
    )
    runtimes: tuple[str, ...] = RUNTIMES
    allow_ops: tuple[str, ...] = ALLOW_OPS
    imports: tuple[str, ...] = IMPORTS
    compile_mode: Literal["regions", "whole"] | None = flag_of(
        LoadOptions, "compile", is_flag=False, flag_value="regions", type=click.Choice(["regions", "whole"])
    )
    compiled_folder: str | None = COMPILED
    adapters: tuple[str, ...] = flag_of(LoadOptions, "adapters")
    processes: int | None = PROCESSES
    trace_file: Path | None = flag(
        "--trace FILE",
        "After the first answer, run the inputs again, and write to FILE when each process computed, waited and transferred for each "
        "request: a trace that https://ui.perfetto.dev shows, and 'stagepack report --trace'.",
        default_text="not written",
    )
    request_count: int = only_with(
        flag(
            "--requests N",
            "With --trace: how often the inputs are run; with several processes, at the same time.",
            type=click.IntRange(1, _MOST_REQUESTS),
            default=_DEFAULT_REQUESTS,
        ),
        "--trace",
    )
    overwrite: bool = only_with(
        flag("--overwrite", "Replace existing files of --outputs and --trace."), "--outputs", "--trace"
    )
    verify: Verify = VERIFY
    trusted_files: tuple[str, ...] = SIGNATURE
    weights: WeightOptions = flags_of(WeightOptions)
    rtol: float | None = RTOL
    atol: float | None = ATOL
    as_json: bool = JSON

    def load_options(self, bundle: Bundle, stage_runtimes: list[str]) -> LoadOptions:
        """Return how the stages of a bundle are loaded, in this process or in others."""
        return LoadOptions(
            devices=self.devices,
            runtime=stage_runtimes,
            allow_ops=self.allow_ops,
            verify=self.verify,
            compile=self.compile_mode or False,
            compiled=self.compiled_folder,
            adapters=pinned_adapters(bundle, self.adapters, given_trusted_files()) or None,
            placement=self.placement,
            **structs.asdict(self.weights),
        )


@subcommand(
    "load",
    examples=[
        "stagepack load net.stagepack",
        "stagepack load net.stagepack --device cuda:0 --device cuda:1",
        "stagepack load net.stagepack --inputs x.safetensors",
        "stagepack load net.stagepack --stage 1 --device cuda",
    ],
    forms_group=True,
)
def command(options: _Options) -> None:
    """Load a bundle and run its example.

    Prints what is read for each stage, the largest difference from the recorded results, and the time that each step takes until the
    first answer. The exit status is 1 if the results of the example are not the recorded ones, within the tolerance of 'stagepack verify
    --run'.
    """
    timer = PhaseTimer()
    bundle = open_argument(options.bundle_path, *options.runtimes)
    timer.end("open")
    if options.stage_number is not None:
        check_stage_number(options.stage_number, bundle)
    stage_runtimes = _check_usage(options, bundle)
    if options.processes or is_launched_group():
        process_facts = _load_in_processes(bundle, options, stage_runtimes, timer)
        if process_facts is not None:
            _report(bundle, process_facts | {"start": timer.seconds}, options)
        return
    for runtime in dict.fromkeys(stage_runtimes):
        with progress(f"importing {runtime}"):
            import_runtime(runtime)
        timer.end(f"import {runtime}")
    load_options = options.load_options(bundle, stage_runtimes)
    facts: dict[str, Any] = {}
    if options.stage_number is None:
        from stagepack_loaders.local_pipeline import Pipeline  # noqa: PLC0415 - after the arguments are checked
        from stagepack_loaders.placement import current_placement, place_bundle  # noqa: PLC0415 - the same

        stored_bundle, placed = bundle, place_bundle(bundle, load_options)
        bundle, load_options = placed.bundle, placed.options
        if placed.chosen is not None or len(bundle.stages) < len(stored_bundle.stages):
            facts["placement"] = str(placed.chosen or current_placement(bundle, load_options.devices))
    else:
        bundle = with_adapters(bundle, load_options.adapters)
    with contextlib.ExitStack() as display:
        count_bytes = display.enter_context(counted_progress("loading stages"))
        stage_facts, stages = _load_stages(bundle, options, load_options, timer, count_bytes)
        facts |= {"bundle": options.bundle_path, "verify": options.verify, "stages": stage_facts}
        if not options.weights.stream:
            display.close()
        if options.stage_number is None:
            facts |= _run(bundle, Pipeline(bundle, stages), options, timer)
        if options.weights.stream:
            facts["all_weights"] = _wait_for_weights(stages, timer)
    _report(bundle, facts | {"start": timer.seconds}, options)


def _check_usage(options: _Options, bundle: Bundle) -> list[str]:
    """Refuse options that do not fit together; return the runtime of each stage that is loaded."""
    is_one_stage = options.stage_number is not None
    in_processes = bool(options.processes) or is_launched_group()
    has_files = options.inputs_file or options.outputs_file
    has_tolerance = (options.rtol, options.atol) != (None, None)
    refused_usage = (
        (is_one_stage and has_files, "--inputs and --outputs run the whole pipeline: leave out --stage"),
        (options.inputs_file and len(options.adapters) > 1, "--inputs runs with one adapter: pass one --adapter"),
        (is_one_stage and len(options.devices) > 1, "--stage loads one stage: pass one --device"),
        (
            is_one_stage and options.placement.is_given,
            "--stage loads one stage: leave out --memory, --speed, --profile, --link and --placement",
        ),
        (is_one_stage and options.trace_file, "--trace runs the whole pipeline: leave out --stage"),
        (options.compile_mode and options.compiled_folder, "--compile and --compiled cannot be used together"),
        (is_one_stage and in_processes, "--stage cannot be used with --processes or torchrun"),
        (is_one_stage and len(options.runtimes) > 1, "--stage loads one stage: pass one --runtime"),
        (
            has_tolerance and (is_one_stage or options.inputs_file),
            "--rtol and --atol are for the results of the example: leave out --stage and --inputs",
        ),
    )
    for is_refused, reason in refused_usage:
        if is_refused:
            raise click.UsageError(reason)
    check_arriving(options.weights, in_processes=in_processes)
    stage_runtimes = runtime_name_of_each_stage(options.runtimes, bundle)
    if options.compile_mode or options.compiled_folder:
        check_runtimes_compile("--compile" if options.compile_mode else "--compiled", stage_runtimes)
    for output_path in filter(None, (options.outputs_file, options.trace_file)):
        check_output_file(output_path, overwrite=options.overwrite)
    has_no_inputs = options.inputs_file is None and bundle.example is None
    if has_no_inputs and (options.outputs_file or options.trace_file or has_tolerance):
        option_name = "--outputs" if options.outputs_file else "--trace" if options.trace_file else "--rtol and --atol"
        fail(f"{option_name}: {bundle.location} has no example to run: pass --inputs")
    return stage_runtimes


def _wait_for_weights(stages: "list[LoadedStage]", timer: PhaseTimer) -> float:
    """Wait until the weights of streamed stages are there; return how long it took from the start, in seconds."""
    start_time = time.perf_counter()
    for stage in stages:
        cast("TorchStage", stage).wait_for_weights()
    return round(sum(timer.seconds.values()) + time.perf_counter() - start_time, 6)


def _load_stages(
    bundle: Bundle, options: _Options, load_options: LoadOptions, timer: PhaseTimer, count_bytes: "ByteProgress"
) -> tuple[list[dict[str, Any]], "list[LoadedStage]"]:
    """Load the stages one after another; return facts about each, and the stages."""
    from stagepack_loaders.base import Loading  # noqa: PLC0415 - after the arguments are checked
    from stagepack_loaders.preparation import compile_prepared, open_for_loading, prepare  # noqa: PLC0415 - the same

    facts, stages = list[dict[str, Any]](), list["LoadedStage"]()
    unchanged_sizes: list[int] = []
    read_files: set[tuple[str, str]] = set()  # by runtime, each of which reads a file that several stages share once
    bundle = open_for_loading(bundle, options.verify)
    loading = Loading(options=load_options, progress=count_bytes, unchanged=unchanged_sizes.append)
    prepared = prepare(bundle, loading, None if options.stage_number is None else [options.stage_number])
    timer.end("graphs")
    ready = compile_prepared(bundle, prepared, load_options)
    if load_options.compiles:
        timer.end("compile")
    for stage_number, prepared_stage in ready.items():
        start_time = time.perf_counter()
        stage = prepared_stage.finish(verify=load_options.verifies_weights)
        stage_facts = _stage_facts(bundle, stage_number, stage, read_files, time.perf_counter() - start_time)
        facts.append(stage_facts | {"bytes_unchanged": sum(unchanged_sizes)})
        unchanged_sizes.clear()
        stages.append(stage)
    timer.end("weights")
    return facts, stages


def _load_in_processes(
    bundle: Bundle, options: _Options, stage_runtimes: list[str], timer: PhaseTimer
) -> dict[str, Any] | None:
    """Load and run stages in processes of their own; return facts about them. None in a process that torchrun started to run stages."""
    from stagepack_loaders.load import start_processes  # noqa: PLC0415 - after the arguments are checked

    with progress("loading stages"):
        process_options = ProcessOptions(imports=options.imports)
        load_options = options.load_options(bundle, stage_runtimes)
        pipeline = start_processes(bundle, options.processes, load_options, process_options, Limits())
    if pipeline is None:
        return None
    timer.end("processes")
    with pipeline:
        stage_facts = [
            {
                "stage": facts.stage,
                "process": facts.rank,
                "host": facts.host,
                "runtime": facts.runtime,
                "device": facts.device,
                "files": list(facts.files),
                "bytes_read": facts.bytes_read,
                "seconds": round(facts.seconds, 6),
            }
            for facts in pipeline.stage_facts
        ]
        facts = {"bundle": bundle.location, "verify": options.verify, "stages": stage_facts}
        if options.placement.is_given or AUTO in options.devices:
            facts["placement"] = str(pipeline.placement)
        return facts | _run(bundle, pipeline, options, timer)


def _stage_facts(
    bundle: Bundle, stage_number: int, stage: "LoadedStage", read_files: set[tuple[str, str]], seconds: float
) -> dict[str, Any]:
    """The facts of a stage. Its files are added to those that runtimes have read, whose bytes do not count again."""
    file_names = list(find_runtime(stage.runtime).stage_files(bundle, stage_number))
    new_files = {(stage.runtime, file_name) for file_name in file_names} - read_files
    read_files |= new_files
    residency: Residency | None = getattr(stage, "residency", None)  # of the stages of torch
    return {
        "stage": stage_number,
        "runtime": stage.runtime,
        "device": str(stage.device),
        "files": file_names,
        "bytes_read": sum(bundle.files[file_name].size for _, file_name in new_files),
        "seconds": round(seconds, 6),
        **({} if residency is None else {"residency": asdict(residency)}),
    }


def _run(bundle: Bundle, pipeline: "CallablePipeline", options: _Options, timer: PhaseTimer) -> dict[str, Any]:
    """Run the inputs of a file, or the example; return facts about the results."""
    from stagepack_loaders import example  # noqa: PLC0415 - after the arguments are checked

    if options.inputs_file is None and bundle.example is None:
        return {}
    # With --stream, the bytes that arrive are shown meanwhile.
    with contextlib.nullcontext() if options.weights.stream else progress("running the pipeline"):
        if options.inputs_file is None:
            inputs, expected = example.read_example(pipeline)
        else:
            inputs, expected = example.read_inputs(pipeline, options.inputs_file), {}
        timer.end("inputs")
        compile_seconds_before = _compile_seconds(options, bundle)
        results = example.run_on_inputs(pipeline, inputs, None if options.inputs_file is None else pipeline.adapters)
        timer.end("first call")
        timer.reassign("first call", "compile", _compile_seconds(options, bundle) - compile_seconds_before)
        if options.outputs_file is not None:
            example.write_outputs(pipeline, results, options.outputs_file)
    facts: dict[str, Any] = {"outputs": len(results)}
    if options.trace_file is not None:
        at_once = DEFAULT_IN_FLIGHT if options.processes or is_launched_group() else 1
        facts["trace"] = trace_requests(pipeline, inputs, options.request_count, options.trace_file, at_once=at_once)
    if options.inputs_file is None:
        tolerance = Tolerance(options.rtol, options.atol)
        facts["difference"] = example.compare_results(pipeline, results, expected, tolerance)
    return facts


def _compile_seconds(options: _Options, bundle: Bundle) -> float:
    """Return how long the compilers of the runtimes have worked in this process, in seconds."""
    return sum(find_runtime(name).compile_seconds() for name in {*runtime_name_of_each_stage(options.runtimes, bundle)})


def _report(bundle: Bundle, facts: dict[str, Any], options: _Options) -> None:
    """Print what was loaded, and what it answered; refuse another answer than the recorded one."""
    difference: Difference | None = facts.get("difference")
    if not options.as_json:
        _print_facts(facts, options)
    else:
        print_json(facts if difference is None else facts | {"difference": finite(difference.largest)})
    if difference is not None:
        check_example_difference(bundle, difference, cure="--rtol and --atol allow a difference")


def _print_facts(facts: dict[str, Any], options: _Options) -> None:
    in_processes = any("process" in stage for stage in facts["stages"])
    rows = [
        [
            str(stage["stage"]),
            *([f"{stage['process']} on {stage['host']}"] if in_processes else []),
            stage["runtime"],
            stage["device"],
            format_bytes(stage["bytes_read"]),
            f"{stage['seconds']:.3f} s",
            " ".join(stage["files"][:_MOST_FILES]) + (" ..." if len(stage["files"]) > _MOST_FILES else ""),
        ]
        for stage in facts["stages"]
    ]
    columns = ["#stage", *(["process"] if in_processes else []), "runtime", "device", "#read", "#time", "files"]
    print_table("loaded stages", columns, rows)
    if "placement" in facts:
        print_line(f"placed: {facts['placement']}")
    unchanged_bytes = sum(stage.get("bytes_unchanged", 0) for stage in facts["stages"])
    print_line(f"verified: {verified_text(facts['verify'], unchanged_bytes)}")
    for stage in (stage for stage in facts["stages"] if "residency" in stage):
        print_line(f"stage {stage['stage']}: {Residency(**stage['residency'])}")
    outputs = count_of("output", facts.get("outputs", 0))
    if "difference" in facts:
        print_line(f"ran the example: {outputs}, largest difference {format_difference(facts['difference'].largest)}")
    elif options.inputs_file is not None:
        print_line(f"ran {options.inputs_file}: {outputs}")
    phases: dict[str, float] = facts["start"]
    durations = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in phases.items())
    print_line(
        f"{'first answer' if 'first call' in phases else 'loaded'} after {sum(phases.values()):.3f} s: {durations}"
    )
    if "all_weights" in facts:
        print_line(f"all weights after {facts['all_weights']:.3f} s")
    if options.outputs_file:
        print_line(f"wrote {options.outputs_file}")
    if "trace" in facts:
        print_trace(facts["trace"])
