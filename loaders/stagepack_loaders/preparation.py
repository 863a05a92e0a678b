"""Prepare the stages of a bundle in their runtimes: everything but the weights is read and checked before a weight is."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from stagepack.errors import OptionError
from stagepack.format.reader import Bundle
from stagepack.opening import BundleSource, DeltaSource, TrustedSigners, opened
from stagepack.terminal import byte_progress
from stagepack_loaders.base import LoadedStage, Loading, PreparedStage, Runtime
from stagepack_loaders.options import LoadOptions, Verify
from stagepack_loaders.placement import place_stages
from stagepack_loaders.registry import find_runtime, import_runtime, runtime_of_each_stage, runtimes


def open_for_loading(
    bundle: BundleSource,
    verify: Verify,
    require_signature: TrustedSigners | None = None,
    deltas: Sequence[DeltaSource] = (),
) -> Bundle:
    """Open a bundle for `load`. Of the weights only a runtime knows when they are read: it is asked to verify them by `finish`."""
    if verify not in get_args(Verify):
        choices = ", ".join(map(repr, get_args(Verify)))
        raise OptionError(f"verify: expected one of {choices}, found {verify!r}")
    if require_signature is not None and verify != "full":
        raise OptionError(
            f"require_signature: the signature is over the digests of all files: leave out verify={verify!r}"
        )
    opened_bundle = opened(bundle, require_signature, deltas)
    if require_signature is not None and not opened_bundle.compares_digests:
        raise OptionError(
            "require_signature: the signature is over the digests of all files: do not use without_digests()"
        )
    return opened_bundle.without_digests() if verify == "off" else opened_bundle


def prepare(bundle: Bundle, loading: Loading, stage_numbers: Iterable[int] | None = None) -> dict[int, PreparedStage]:
    """Prepare some stages of a bundle, or all of them, each in its runtime and for its device; return them by number, in order."""
    options = loading.options
    stage_runtimes = runtime_of_each_stage(options.runtime, bundle)
    stage_devices = place_stages(bundle.entry_point, options.devices)
    if not all(runtime.keeps_strides for runtime in stage_runtimes):
        loading = replace(loading, dense_inputs=True)
    placements: dict[Runtime, dict[int, Any]] = {}
    for stage_number in range(len(bundle.stages)) if stage_numbers is None else stage_numbers:
        placements.setdefault(stage_runtimes[stage_number], {})[stage_number] = stage_devices[stage_number]
    check_runtimes(placements, options)
    prepared_stages: dict[int, PreparedStage] = {}
    for runtime, placement in placements.items():
        prepared_stages.update(prepare_placed(bundle, placement, runtime, loading))
    return dict(sorted(prepared_stages.items()))


def prepare_placed(
    bundle: Bundle, placement: Mapping[int, Any], runtime: Runtime, loading: Loading
) -> Mapping[int, PreparedStage]:
    """Prepare some stages of a bundle in one runtime. Those on one device will share the tensors that are one tensor in the model."""
    import_runtime(runtime.name)
    devices = {stage_number: runtime.parse_device(device) for stage_number, device in placement.items()}
    return runtime.prepare(bundle, devices, loading)


def check_runtimes(stage_runtimes: Iterable[Runtime], options: LoadOptions) -> None:
    """Check that runtimes can do what the caller asks, before anything is read."""
    needs = (
        ("compiles", options.compiles, "does not compile stages", "compile and compiled"),
        ("streams", options.arriving is not None, "does not stream weights", options.arriving),
        ("adapts", options.adapters is not None, "takes no adapters", "adapters"),
        ("runs_modules", options.modules, "has no modules", "modules=True"),
    )
    for ability, is_asked, lack, cause in needs:
        for runtime in stage_runtimes if is_asked else ():
            if not getattr(runtime, ability):
                able = " or ".join(
                    repr(able_runtime.name) for able_runtime in runtimes() if getattr(able_runtime, ability)
                )
                raise OptionError(f"{runtime.title} {lack}: leave out {cause}, or choose runtime={able}")


@contextlib.contextmanager
def reading_progress(bundle: Bundle, stage_numbers: Iterable[int], loading: Loading) -> Iterator[Loading]:
    """Show on a terminal how many bytes of the weights of some stages are read, if that takes more than a second.

    Stages that are streamed are ready before their bytes are read, which are not shown.
    """
    if loading.options.stream:
        yield loading
        return
    file_names = {file_name for stage_number in stage_numbers for file_name in bundle.stages[stage_number].weights}
    total_bytes = sum(bundle.files[file_name].size for file_name in file_names)
    with byte_progress(f"loading {bundle.location}", total_bytes) as count_bytes:
        yield replace(loading, progress=count_bytes, unchanged=count_bytes)


def compile_prepared(
    bundle: Bundle, prepared_stages: Mapping[int, PreparedStage], options: LoadOptions
) -> dict[int, PreparedStage]:
    """Return stages that run compiled as the caller asks, and the same stages if nothing is asked."""
    ready_stages = dict(prepared_stages)
    for runtime, stages in _stages_by_runtime(prepared_stages) if options.compiles else ():
        ready_stages.update(runtime.compile_stages(bundle, stages, options))
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
