"""The options of the subcommands that run bundles, and what these subcommands do with them. Runtimes are imported when they are needed."""

from collections.abc import Sequence
from typing import Final

import click

from stagepack.cli.command import ByteSize, Number, PathType, PlacementCounts, Text, flag, flag_of, flags_of
from stagepack.format.quantities import format_bytes
from stagepack.format.reader import Bundle
from stagepack.options import options_of
from stagepack_loaders import registry
from stagepack_loaders.distributed.launch_environment import is_launched_group
from stagepack_loaders.options import DEFAULT_RUNTIME, LoadOptions, PlacementOptions, Verify, WeightOptions
from stagepack_loaders.registry import find_runtime, runtime_names

_VERIFIED_PARTS: Final = {
    "full": "all files that were read",
    "manifest": "all but the content of weight files (--verify manifest)",
    "off": "the manifest only (--verify off)",
}


def _check_devices(_context: click.Context, _option: click.Parameter, devices: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse the device of torch that holds shapes and no numbers; the runtimes check all else."""
    if any(device.partition(":")[0] == "meta" for device in devices):
        raise click.BadParameter("tensors on the device meta have no data.")
    return devices


def _check_process_count(_context: click.Context, _option: click.Parameter, process_count: int | None) -> int | None:
    if process_count is not None and is_launched_group():
        raise click.UsageError("torchrun has started the processes: leave out --processes")
    return process_count


class RuntimeName(click.ParamType):  # type: ignore[type-arg]
    """The name of a registered runtime. Modules that `--import` names may have registered it just before."""

    name = "runtime"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name if a runtime has it."""
        if value not in (names := (DEFAULT_RUNTIME, *runtime_names())):
            self.fail(f"{value!r} is not one of {', '.join(map(repr, names))}.", param, ctx)
        return value


DEVICES = flag_of(LoadOptions, "devices", callback=_check_devices)
PLACEMENT = flags_of(
    PlacementOptions,
    memory=flag_of(PlacementOptions, "memory", type=ByteSize(), multiple=True),
    speeds=flag_of(PlacementOptions, "speeds", type=Number(min=0, min_open=True), multiple=True),
    profiles=flag_of(PlacementOptions, "profiles", type=Text(), multiple=True),
    links=flag_of(PlacementOptions, "links", type=Text(), multiple=True),
    stages_per_device=flag_of(
        PlacementOptions,
        "stages_per_device",
        type=PlacementCounts(),
        callback=lambda _context, _option, counts: counts or (),
    ),
)
RUNTIMES = flag_of(
    LoadOptions,
    "runtime",
    help=options_of(LoadOptions)["runtime"][0].meaning.format(runtimes=", ".join(runtime_names())),
    default=(DEFAULT_RUNTIME,),
    type=RuntimeName(),
)
COMPILED = flag_of(LoadOptions, "compiled", type=PathType())
VERIFY = flag_of(LoadOptions, "verify")
PROCESSES = flag(
    "--processes N",
    "Run the stages in N processes of their own on this machine; with fewer processes than stages, consecutive stages share one. "
    "Under torchrun, whose processes are used instead, leave it out.",
    default_text="all stages in this process",
    type=click.IntRange(1),
    callback=_check_process_count,
)
INPUTS_FILE = flag(
    "--inputs FILE",
    "Run these inputs: a safetensors file with a tensor for each input edge, under its name.",
    default_text="the example of the bundle",
)


def runtime_name_of_each_stage(runtimes: Sequence[str], bundle: Bundle) -> list[str]:
    """Return the name of the runtime of each stage."""
    stage_count = len(bundle.stages)
    if len(runtimes) not in (1, stage_count):
        raise click.UsageError(
            f"--runtime: expected one runtime, or one for each of {stage_count} stages, found {len(runtimes)}"
        )
    named = registry.runtime_of_each_stage(runtimes if len(runtimes) > 1 else runtimes[0], bundle)
    return [runtime.name for runtime in named]


def check_runtimes_compile(flag: str, runtimes: Sequence[str]) -> None:
    """Refuse an option for compiled stages with a runtime that does not run them."""
    if not all(name == DEFAULT_RUNTIME or find_runtime(name).compiles for name in runtimes):
        compiling_runtimes = " or ".join(runtime.name for runtime in registry.runtimes() if runtime.compiles)
        raise click.UsageError(f"{flag} requires the runtime {compiling_runtimes} for all stages: leave out --runtime")


def check_arriving(weights: WeightOptions, *, in_processes: bool) -> str | None:
    """Return the flag by which weights come while a stage runs; refuse it for stages in processes of their own."""
    if weights.arriving is None:
        return None
    [flag_name, *_] = options_of(WeightOptions)[weights.arriving][0].usage.split()
    if in_processes:
        raise click.UsageError(f"{flag_name} cannot be used with --processes or torchrun")
    return flag_name


def verified_text(verify: Verify, unchanged_bytes: int) -> str:
    """Return what a load compared with its digest, and of how many bytes of weights an earlier load did."""
    earlier = f"; {format_bytes(unchanged_bytes)} of weights earlier, and they are unchanged since"
    return _VERIFIED_PARTS[verify] + (earlier if unchanged_bytes else "")


def batching_text(max_batch: int, reason_without: str) -> str:
    """Describe whether requests are combined into batches; if they are not, `reason_without` says why."""
    if max_batch > 1:
        return f"batches of up to {max_batch}"
    return f"no batching: {reason_without}" if reason_without else "no batching"
