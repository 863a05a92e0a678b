"""The options that say where to cut, which several subcommands take."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import click


def cut_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; the command gets `where`, a function that returns a `Where` of the options that were given, or None.

    It is a function since numpy is imported for it, after the arguments are checked. None says that nothing was given.
    """

    @functools.wraps(function)
    def wrapped(
        stages: int | None,
        split_at: tuple[str, ...],
        plan_file: str | None,
        memory: tuple[str, ...],
        speeds: tuple[float, ...],
        shared: Literal["replicate", "transmit"],
        **others: Any,
    ) -> Any:
        ways = {"--stages": stages is not None, "--split-at": bool(split_at), "--plan": plan_file is not None}
        given = [name for name, found in ways.items() if found]
        if len(given) > 1:
            raise click.UsageError(f"{' and '.join(given)} exclude each other")
        if (memory or speeds) and stages is None:
            raise click.UsageError("--memory and --speed choose among cuts: give --stages too")

        def where() -> Any:
            from stagepack.partition.cut_options import CutOptions  # noqa: PLC0415 - the same
            from stagepack.partition.plan_file import read_plan  # noqa: PLC0415 - numpy, after the arguments are checked

            plan = None if plan_file is None else read_plan(plan_file)
            return CutOptions(stages=stages, split_at=split_at, plan=plan, memory=memory, speeds=speeds, shared=shared)

        return function(where=where if given or shared != "replicate" else None, **others)

    options = [
        click.option(
            "--stages", type=click.IntRange(min=1), help="Cut into this many stages, the slowest as fast as can be."
        ),
        click.option(
            "--split-at", multiple=True, metavar="MODULE", help="Start a stage at this module; may be repeated."
        ),
        click.option("--plan", "plan_file", metavar="FILE", help="Cut as a plan says that `stagepack plan -o` wrote."),
        click.option(
            "--memory", multiple=True, metavar="SIZE", help="With --stages: of each stage's device, such as 24GiB."
        ),
        click.option(
            "--speed", "speeds", type=float, multiple=True, help="With --stages: of each stage's device, relative."
        ),
        click.option(
            "--shared",
            type=click.Choice(["replicate", "transmit"]),
            default="replicate",
            show_default=True,
            help="A weight that several stages use: each holds it, or the first sends it.",
        ),
    ]
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), wrapped)
