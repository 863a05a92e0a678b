"""Prepare the stages of a bundle in their runtimes: everything but the weights is read and checked before a weight is."""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from stagepack.errors import OptionError
from stagepack.format.reader import Bundle
from stagepack.opening import BundleSource, TrustedSigners, opened
from stagepack.terminal import byte_progress
from stagepack_loaders.base import LoadedStage, PreparedStage, PrepareOptions, Runtime, Verify
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.placement import place_stages
from stagepack_loaders.registry import find_runtime, import_runtime, runtime_of_each_stage, runtimes


def open_for_loading(bundle: BundleSource, verify: Verify, require_signature: TrustedSigners | None = None) -> Bundle:
    """Open a bundle for `load`. Of the weights only a runtime knows when they are read: it is asked to verify them by `finish`."""
    if verify not in get_args(Verify):
        choices = ", ".join(map(repr, get_args(Verify)))
        raise OptionError(f"verify: expected one of {choices}, found {verify!r}")
    if require_signature is not None and verify != "full":
        raise OptionError(
            f"require_signature: the signature is over the digests of all files: leave out verify={verify!r}"
        )
    opened_bundle = opened(bundle, require_signature)
    if require_signature is not None and not opened_bundle.compares_digests:
        raise OptionError(
            "require_signature: the signature is over the digests of all files: do not use without_digests()"
        )
    return opened_bundle.without_digests() if verify == "off" else opened_bundle


def prepare_all(
    bundle: Bundle, devices: Sequence[Any], runtime: str | Sequence[str], options: PrepareOptions
) -> dict[int, PreparedStage]:
    """Prepare all stages of a bundle.

    The result is the prepared stages by number, in order.
    """
    stage_runtimes = runtime_of_each_stage(runtime, bundle)
    if not all(chosen_runtime.keeps_strides for chosen_runtime in stage_runtimes):
        options = replace(options, dense_inputs=True)
    stage_devices = place_stages(bundle.entry_point, devices)
    prepared_stages: dict[int, PreparedStage] = {}
    for stage_runtime in dict.fromkeys(stage_runtimes):
        placement = {
            stage_number: device
            for stage_number, device in enumerate(stage_devices)
            if stage_runtimes[stage_number] is stage_runtime
        }
        prepared_stages.update(prepare_placed(bundle, placement, stage_runtime.name, options))
    return dict(sorted(prepared_stages.items()))


def prepare_stage(
    bundle: Bundle, stage_number: int, device: object, runtime: str, options: PrepareOptions
) -> PreparedStage:
    """Prepare one stage of a bundle."""
    return prepare_placed(bundle, {stage_number: device}, runtime, options)[stage_number]


def prepare_placed(
    bundle: Bundle, placement: Mapping[int, Any], runtime_name: str, options: PrepareOptions
) -> Mapping[int, PreparedStage]:
    """Prepare some stages of a bundle in one runtime. Those on one device will share the tensors that are one tensor in the model."""
    runtime = find_runtime(runtime_name)
    if options.modules and not runtime.runs_modules:
        able = " or ".join(repr(able_runtime.name) for able_runtime in runtimes() if able_runtime.runs_modules)
        raise OptionError(f"{runtime.title} has no modules: leave out modules=True, or choose runtime={able}")
    import_runtime(runtime_name)
    devices = {stage_number: runtime.parse_device(device) for stage_number, device in placement.items()}
    return runtime.prepare(bundle, devices, options)


def check_load_options(stage_runtimes: Sequence[Runtime], options: LoadOptions, *, processes: bool = False) -> None:
    """Check that stages can be loaded as the caller asks, before anything is read.

    processes: whether the stages run in processes of their own.
    """
    if options.compile and options.compiled is not None:
        raise OptionError("compile and compiled exclude each other: give one of them")
    if options.modules and options.compiles:
        raise OptionError("modules excludes compile and compiled: a stage that runs by its modules is not compiled")
    for runtime in stage_runtimes if options.compiles else ():
        if not runtime.compiles:
            able = " or ".join(repr(able_runtime.name) for able_runtime in runtimes() if able_runtime.compiles)
            raise OptionError(
                f"{runtime.title} does not compile stages: leave out compile and compiled, or choose runtime={able}"
            )
    if not options.stream and options.device_memory is None:
        return
    option = "stream" if options.device_memory is None else "device_memory"
    for runtime in stage_runtimes:
        if not runtime.streams:
            able = " or ".join(repr(able_runtime.name) for able_runtime in runtimes() if able_runtime.streams)
            raise OptionError(f"{runtime.title} does not stream weights: leave out {option}, or choose runtime={able}")
    excluded_options = {
        "compile": options.compile,
        "compiled": options.compiled is not None,
        "copy": options.copy,
        "modules": options.modules,
        "processes": processes,
        "stream": options.stream and option != "stream",
    }
    for option_name, is_given in excluded_options.items():
        if is_given:
            raise OptionError(f"{option} excludes {option_name}: leave out one of them")


@contextlib.contextmanager
def reading_progress(
    bundle: Bundle, stage_numbers: Iterable[int], options: LoadOptions, types: Collection[type] = ()
) -> Iterator[PrepareOptions]:
    """Show on a terminal how many bytes of the weights of some stages are read, if that takes more than a second.

    It yields the options for preparing these stages. Stages that are streamed are ready before their bytes are read, which are not shown.
    """
    read_stages = () if options.stream else stage_numbers
    file_names = {file_name for stage_number in read_stages for file_name in bundle.stages[stage_number].weights}
    total_bytes = sum(bundle.files[file_name].size for file_name in file_names)
    with byte_progress(f"loading {bundle.location}", total_bytes) as count_bytes:
        progress = None if options.stream else count_bytes
        yield PrepareOptions(
            allow_ops=options.allow_ops,
            modules=options.modules,
            types=types,
            stream=options.stream,
            device_memory=options.device_memory,
            copy=options.copy,
            progress=progress,
            unchanged=progress,
        )


def compile_prepared(
    bundle: Bundle, prepared_stages: Mapping[int, PreparedStage], options: LoadOptions
) -> dict[int, PreparedStage]:
    """Return stages that run compiled as the caller asks, and the same stages if nothing is asked."""
    check_load_options([find_runtime(stage.runtime) for stage in prepared_stages.values()], options)
    ready_stages = dict(prepared_stages)
    for runtime, stages in _stages_by_runtime(prepared_stages) if options.compiles else ():
        ready_stages.update(runtime.compile_stages(bundle, stages, options.compile, options.compiled))
    return ready_stages


def finish_prepared(bundle: Bundle, stages: Mapping[int, PreparedStage], *, verify: bool) -> dict[int, LoadedStage]:
    """Read the weights of stages that were prepared together.

    The result is the loaded stages by number, in order.
    """
    loaded_stages: dict[int, LoadedStage] = {}
    for runtime, runtime_stages in _stages_by_runtime(stages):
        loaded_stages.update(runtime.finish_stages(bundle, runtime_stages, verify=verify))
    return dict(sorted(loaded_stages.items()))


def _stages_by_runtime(stages: Mapping[int, PreparedStage]) -> Iterator[tuple[Runtime, dict[int, PreparedStage]]]:
    """Yield each runtime that stages run in, with its stages."""
    runtime_names = {stage_number: stage.runtime for stage_number, stage in stages.items()}
    for runtime_name in dict.fromkeys(runtime_names.values()):
        yield (
            find_runtime(runtime_name),
            {
                stage_number: stage
                for stage_number, stage in stages.items()
                if runtime_names[stage_number] == runtime_name
            },
        )
