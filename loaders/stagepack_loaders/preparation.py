"""Prepare the stages of a bundle in their runtimes: everything but the weights is read and checked before a weight is."""

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from stagepack.errors import OptionError
from stagepack.format.chunks import ByteProgress
from stagepack.format.dtypes import parse_byte_size
from stagepack.format.reader import Bundle
from stagepack.opening import BundleSource, TrustedSigners, opened
from stagepack.terminal import byte_progress
from stagepack_loaders.base import Compile, LoadedStage, PreparedStage, PrepareOptions, Runtime, Verify
from stagepack_loaders.call_limits import ValueLimit
from stagepack_loaders.pipeline import Pipeline
from stagepack_loaders.placement import place_stages
from stagepack_loaders.registry import choose_runtime, find_runtime, import_runtime, runtimes


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


def runtime_of_each_stage(runtime: str | Sequence[str], bundle: Bundle) -> list[Runtime]:
    """Return the runtime of each stage, without importing its library."""
    stage_count = len(bundle.stages)
    if not isinstance(runtime, list | tuple):
        return [choose_runtime(runtime, bundle, range(stage_count))] * stage_count
    if len(runtime) != stage_count:
        raise OptionError(f"expected a runtime, or one for each of {stage_count} stages, found {len(runtime)}")
    return [choose_runtime(runtime_name, bundle, [number]) for number, runtime_name in enumerate(runtime)]


def prepare_all(
    bundle: Bundle,
    devices: Sequence[Any],
    runtime: str | Sequence[str],
    options: PrepareOptions,
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
        prepared_stages.update(_prepare_in(stage_runtime, bundle, placement, options))
    return dict(sorted(prepared_stages.items()))


def prepare_stage(
    bundle: Bundle, stage_number: int, device: object, runtime: str, options: PrepareOptions
) -> PreparedStage:
    """Prepare one stage of a bundle."""
    return prepare_placed(bundle, {stage_number: device}, runtime, options)[stage_number]


def prepare_placed(
    bundle: Bundle, placement: Mapping[int, Any], runtime: str, options: PrepareOptions
) -> Mapping[int, PreparedStage]:
    """Prepare some stages of a bundle in one runtime. Those on one device will share the tensors that are one tensor in the model."""
    return _prepare_in(find_runtime(runtime), bundle, placement, options)


def _prepare_in(
    runtime: Runtime, bundle: Bundle, placement: Mapping[int, Any], options: PrepareOptions
) -> Mapping[int, PreparedStage]:
    """Prepare stages that share a runtime."""
    if options.modules and not runtime.runs_modules:
        able = " or ".join(repr(able_runtime.name) for able_runtime in runtimes() if able_runtime.runs_modules)
        raise OptionError(f"{runtime.title} has no modules: leave out modules=True, or choose runtime={able}")
    import_runtime(runtime.name)
    devices = {stage_number: runtime.parse_device(device) for stage_number, device in placement.items()}
    return runtime.prepare(bundle, devices, options)


def check_compile_options(
    stage_runtimes: Sequence[Runtime], compile: Compile, compiled: str | os.PathLike[str] | None
) -> None:
    """Check that stages can be compiled as the caller asks, before anything is read."""
    if compile and compiled is not None:
        raise OptionError("compile and compiled exclude each other: give one of them")
    if compile is False and compiled is None:
        return
    for runtime in stage_runtimes:
        if not runtime.compiles:
            able = " or ".join(repr(able_runtime.name) for able_runtime in runtimes() if able_runtime.compiles)
            raise OptionError(
                f"{runtime.title} does not compile stages: leave out compile and compiled, or choose runtime={able}"
            )


def check_stream_options(
    stage_runtimes: Sequence[Runtime], stream: bool, device_memory: int | str | None, **excluded_options: object
) -> int | None:
    """Check that weights of stages can arrive while the stages run, if the caller asks for that.

    The result is `device_memory` in bytes.
    """
    if not stream and device_memory is None:
        return None
    option = "stream" if device_memory is None else "device_memory"
    for runtime in stage_runtimes:
        if not runtime.streams:
            able = " or ".join(repr(able_runtime.name) for able_runtime in runtimes() if able_runtime.streams)
            raise OptionError(f"{runtime.title} does not stream weights: leave out {option}, or choose runtime={able}")
    if device_memory is not None:
        excluded_options["stream"] = stream
    for option_name, value in excluded_options.items():
        if value:
            raise OptionError(f"{option} excludes {option_name}: leave out one of them")
    try:
        return None if device_memory is None else parse_byte_size(device_memory)
    except ValueError as error:
        raise OptionError(f"device_memory: {error}") from None


@contextlib.contextmanager
def reading_progress(bundle: Bundle, stage_numbers: Iterable[int]) -> Iterator[ByteProgress]:
    """Show on a terminal how many bytes of the weights of some stages are read, if that takes more than a second.

    It yields a function that takes the number of further bytes that were read. Several threads may call it.
    """
    file_names = {file_name for stage_number in stage_numbers for file_name in bundle.stages[stage_number].weights}
    total_bytes = sum(bundle.files[file_name].size for file_name in file_names)
    with byte_progress(f"loading {bundle.location}", total_bytes) as count_bytes:
        yield count_bytes


def compile_prepared(
    bundle: Bundle,
    prepared_stages: Mapping[int, PreparedStage],
    compile: Compile,
    compiled: str | os.PathLike[str] | None,
) -> dict[int, PreparedStage]:
    """Return stages that run compiled as the caller asks, and the same stages if nothing is asked."""
    check_compile_options([find_runtime(stage.runtime) for stage in prepared_stages.values()], compile, compiled)
    ready_stages = dict(prepared_stages)
    if compile is False and compiled is None:
        return ready_stages
    for runtime, stages in _stages_by_runtime(prepared_stages):
        ready_stages.update(runtime.compile_stages(bundle, stages, compile, compiled))
    return ready_stages


def finish_prepared(bundle: Bundle, stages: Mapping[int, PreparedStage], *, verify: bool) -> dict[int, LoadedStage]:
    """Read the weights of stages that were prepared together.

    The result is the loaded stages by number, in order.
    """
    loaded_stages: dict[int, LoadedStage] = {}
    for runtime, runtime_stages in _stages_by_runtime(stages):
        loaded_stages.update(runtime.finish_stages(bundle, runtime_stages, verify=verify))
    return dict(sorted(loaded_stages.items()))


def finish_pipeline(
    bundle: Bundle,
    stages: Mapping[int, PreparedStage],
    types: Collection[type],
    *,
    verify: bool,
    limit: ValueLimit | None = None,
) -> Pipeline:
    """Read the weights of all stages of a bundle, and connect them.

    limit: the largest size of values; None for no limit.
    """
    return Pipeline(bundle, list(finish_prepared(bundle, stages, verify=verify).values()), types, limit)


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
