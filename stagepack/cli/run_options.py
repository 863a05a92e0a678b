"""What the subcommands that run bundles share. Torch and ONNX Runtime are imported when they are needed."""

import importlib
import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import click

from stagepack.format.reader import Bundle
from stagepack_serving.server.limits import Limits

if TYPE_CHECKING:
    from stagepack_loaders.example import Difference


def operator_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options for custom operators: `allow_ops` and `imports`."""
    allow = click.option(
        "--allow-ops", multiple=True, metavar="NAMESPACE", help="A namespace of custom operators that may run."
    )
    imports = click.option(
        "--import", "imports", multiple=True, metavar="MODULE", help="A module to import first, which registers them."
    )
    return allow(imports(function))


def limit_option(
    flag: str, field: str, help: str, *, unit: float = 1.0, least: float = 0.0, most: float = 86_400.0
) -> Callable[..., Any]:
    """An option for a field of `Limits`, given in `unit` of the field's own, from `least` to `most`: a day, for times in seconds."""
    default = getattr(Limits(), field)
    whole = isinstance(default, int) and unit == 1

    def scaled(_context: click.Context, _option: click.Parameter, value: float) -> float:
        if math.isnan(value):  # it is in no range, and not out of it
            raise click.BadParameter("nan is no number")
        return type(default)(value * unit)  # type: ignore[no-any-return]

    return click.option(
        flag,
        field,
        default=default if whole else default / unit,
        show_default=True,
        type=click.IntRange(int(least), 2**31 - 1) if whole else click.FloatRange(least, most),
        callback=scaled,
        help=help,
    )


def runtime_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option `runtimes`."""
    return click.option(
        "--runtime",
        "runtimes",
        multiple=True,
        type=click.Choice(["torch", "onnxruntime"]),
        help="What runs the stages: one for all, or one a stage in order. Default: torch.",
    )(function)


def chosen(runtimes: Sequence[str], stages: int) -> list[Any]:
    """The runtime of each stage.

    Raises:
        UsageError: neither one nor one a stage was given.
    """
    if len(runtimes) not in (0, 1, stages):
        raise click.UsageError(f"--runtime: expected one, or one for each of {stages} stages, found {len(runtimes)}")
    return list(runtimes) if len(runtimes) == stages else [*(runtimes or ["torch"])] * stages


def namespaces(bundle: Bundle) -> list[str]:
    """The namespaces of custom operators that a bundle needs."""
    return sorted({name for stage in bundle.stages for name in stage.namespaces})


def replayed(bundle: Bundle, *, runtimes: Sequence[Any] = (), allow_ops: Collection[str] = ()) -> "Difference":
    """Load a bundle, whose digests are known to be right, and run its example."""
    for kind in dict.fromkeys(runtimes or ["torch"]):
        importlib.import_module(f"stagepack_loaders.{kind}.stage")  # so that what is said to be missing is the runtime
    from stagepack_loaders.example import replay_example  # noqa: PLC0415 - after the arguments are checked
    from stagepack_loaders.load import load  # noqa: PLC0415 - the same

    return replay_example(load(bundle, runtime=runtimes or "torch", allow_ops=allow_ops, verify=False), bundle)
