"""The options that say how to cut a model, shared by `export`, `plan` and `recut`."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import click

from stagepack.cli.path_options import PathType
from stagepack.format import limits

if TYPE_CHECKING:
    from stagepack.partition.cut_options import CutOptions

profile_option = click.option(
    "--profile",
    "profile_name",
    metavar="DEVICE|FILE",
    show_default="a device of 50 TFLOP/s",
    help="Device that the times are of: a10, a100, b200, h100, h200, l4, l40s, mi300x, t4 or v100, whose memory also limits the stages "
    "unless --memory is given; or a file of 'stagepack profile' with measured times of the model's operators.",
)
_OPTIONS = (
    click.option(
        "--stages",
        "stage_count",
        type=click.IntRange(1, limits.STAGES),
        metavar="N",
        help="Cut into N stages so that the slowest stage is as fast as possible.",
    ),
    click.option(
        "--split-at",
        "split_modules",
        multiple=True,
        metavar="MODULE",
        show_default="none",
        help="Start a new stage at this module of the model, such as layers.8. Repeatable.",
    ),
    click.option(
        "--plan",
        "plan_file",
        type=PathType(),
        metavar="FILE",
        show_default="none",
        help="Cut as described in a plan file, written by 'stagepack plan --out'.",
    ),
    click.option(
        "--memory",
        "memory_sizes",
        multiple=True,
        metavar="SIZE",
        show_default="unlimited",
        help="Memory of the device of each stage in order, such as 24GiB, 24GB or a number of bytes. "
        "Repeat it for each stage. Requires --stages.",
    ),
    click.option(
        "--speed",
        "speeds",
        type=float,
        multiple=True,
        metavar="FACTOR",
        show_default="1 for each stage",
        help="Relative speed of the device of each stage in order: 2 is twice as fast as 1. "
        "Repeat it for each stage. Requires --stages.",
    ),
    profile_option,
    click.option(
        "--shared",
        "weight_sharing",
        type=click.Choice(["replicate", "transmit"]),
        default="replicate",
        show_default=True,
        help="What happens to a weight that several stages use: replicate loads it in each of them, transmit loads it in the first "
        "one, which sends it to the others in each call.",
    ),
)


def cut_option_flags(function: Callable[..., Any], *, shows_times: bool = False) -> Callable[..., Any]:
    """Add the options to a subcommand, which receives them as the argument `make_cut_options`.

    It is a function that returns `CutOptions`, because that class needs numpy, which is imported after the command line is checked. It
    is None when none of the options is used. With `shows_times` the subcommand shows the times of a cut, so that it takes a profile for
    any cut; else a profile only chooses among the cuts into a number of stages.
    """

    @functools.wraps(function)
    def wrapped(
        stage_count: int | None,
        split_modules: tuple[str, ...],
        plan_file: str | None,
        memory_sizes: tuple[str, ...],
        speeds: tuple[float, ...],
        profile_name: str | None,
        weight_sharing: Literal["replicate", "transmit"],
        **arguments: Any,
    ) -> Any:
        ways = {"--stages": stage_count is not None, "--split-at": split_modules, "--plan": plan_file is not None}
        used_flags = [flag for flag, is_used in ways.items() if is_used]
        if len(used_flags) > 1:
            raise click.UsageError(f"{' and '.join(used_flags)} cannot be used together")
        if (memory_sizes or speeds) and stage_count is None:
            raise click.UsageError(f"{'--memory' if memory_sizes else '--speed'} requires --stages")
        if profile_name is not None and stage_count is None and not shows_times:
            raise click.UsageError("--profile requires --stages")

        def make_cut_options() -> "CutOptions":
            from stagepack.partition.cut_options import CutOptions, read_plan  # noqa: PLC0415 - numpy, see above

            return CutOptions(
                stages=stage_count,
                split_at=split_modules,
                plan=None if plan_file is None else read_plan(plan_file),
                memory=memory_sizes,
                speeds=speeds,
                profile=profile_name,
                shared=weight_sharing,
            )

        is_used = used_flags or profile_name is not None or weight_sharing != "replicate"
        return function(make_cut_options=make_cut_options if is_used else None, **arguments)

    return functools.reduce(lambda decorated, option: option(decorated), reversed(_OPTIONS), wrapped)
