"""The option for stages in processes of their own, and the same under torchrun."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from stagepack.format.reader import Bundle
from stagepack_loaders.call_limits import Limits
from stagepack_loaders.distributed.launch_environment import is_launched_group

if TYPE_CHECKING:
    from stagepack_loaders.base import Verify
    from stagepack_loaders.distributed.pipeline import DistributedPipeline


def processes_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--processes`, passed as `processes`."""
    return click.option(
        "--processes",
        type=click.IntRange(1),
        metavar="N",
        show_default="all stages in this process",
        help="Run the stages in N processes of their own on this machine; with fewer processes than stages, consecutive stages share one. "
        "Under torchrun, whose processes are used instead, leave it out.",
    )(function)


def start_processes(
    bundle: Bundle,
    process_count: int | None,
    *,
    devices: Sequence[str],
    runtimes: Sequence[str],
    allow_ops: Sequence[str],
    imports: Sequence[str],
    verify: "Verify" = "full",
    copy: bool = False,
    compile_mode: Any = False,
    compiled_folder: str | None = None,
    max_restarts: int = 0,
    limits: Limits | None = None,
) -> "DistributedPipeline | None":
    """Start processes on this machine, or take those that torchrun has started.

    process_count: the number of processes on this machine; None under torchrun.
    The result is the pipeline; None in a process that torchrun started to run stages, when the pipeline is closed.
    """
    if process_count is None:
        from stagepack_loaders.distributed.connect import connect  # noqa: PLC0415 - imports torch

        return connect(
            bundle,
            tuple(devices),
            runtime=runtimes,
            allow_ops=allow_ops,
            verify=verify,
            copy=copy,
            compile=compile_mode,
            compiled=compiled_folder,
            limits=limits,
        )
    if is_launched_group():
        raise click.UsageError("torchrun has started the processes: leave out --processes")
    from stagepack_loaders.load import load  # noqa: PLC0415 - imports torch

    return load(
        bundle,
        list(devices),
        runtime=list(runtimes),
        allow_ops=allow_ops,
        verify=verify,
        copy=copy,
        compile=compile_mode,
        compiled=compiled_folder,
        processes=process_count,
        imports=imports,
        max_restarts=max_restarts,
        limits=limits,
    )
