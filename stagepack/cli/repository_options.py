"""The options of `stagepack serve` for a model repository, and who loads its models."""

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagepack.cli.model_loading import BundleLoading, ServeOptions
from stagepack.cli.path_options import PathType

if TYPE_CHECKING:
    from stagepack_serving.server.model_control import ModelControl
    from stagepack_serving.server.model_registry import ModelRegistry


class VersionPolicy(click.ParamType[int | None]):
    """``latest``, ``latest:N`` or ``all``, as the number of versions; None for all."""

    name = "policy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Convert a value of the command line."""
        match = re.fullmatch(r"latest(?::([1-9][0-9]{0,5}))?|all", value)
        if match is None:
            self.fail(f"expected latest, latest:N or all, found {value!r}.", param, ctx)
        return None if value == "all" else int(match[1] or 1)


def repository_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for a model repository, passed as fields of `ServeOptions`."""
    options = (
        click.option(
            "--model-repository",
            "repository",
            type=PathType(Path),
            metavar="FOLDER",
            show_default="bundles as arguments",
            help="Serve the models in FOLDER, in which FOLDER/NAME/VERSION is a bundle, as Triton has it; versions are numbers.",
        ),
        click.option(
            "--model-control",
            "control_mode",
            type=click.Choice(["none", "explicit", "poll"]),
            metavar="MODE",
            default="none",
            show_default=True,
            help="Who decides after the start what is loaded. none: nobody. explicit: clients, by the requests 'load' and 'unload'. "
            "poll: changes of the bundles.",
        ),
        click.option(
            "--load-model",
            "load_names",
            multiple=True,
            metavar="NAME",
            show_default="none",
            help="With --model-repository and --model-control explicit: a model to load at the start; '*' is all. Repeatable.",
        ),
        click.option(
            "--poll-s",
            "poll_seconds",
            type=click.FloatRange(0.1, 86_400),
            default=15,
            show_default=True,
            metavar="SECONDS",
            help="With --model-control poll: time between two looks at the bundles, in seconds.",
        ),
        click.option(
            "--version-policy",
            "version_count",
            type=VersionPolicy(),
            default="latest",
            show_default=True,
            metavar="POLICY",
            help="The versions of each model that are served: latest, the N newest as latest:N, or all.",
        ),
    )
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), function)


def check_sources(bundle_paths: Mapping[str, str], options: ServeOptions) -> None:
    """Refuse bundles beside a model repository, neither of them, and `--load-model` without clients that load."""
    if not bundle_paths and options.repository is None:
        raise click.UsageError("Missing argument '[NAME=]BUNDLE...', or the option --model-repository.")
    if bundle_paths and options.repository is not None:
        raise click.UsageError("bundles and --model-repository cannot be used together")
    for path in [*bundle_paths.values(), *([] if options.repository is None else [str(options.repository)])]:
        if _is_written_for_triton(Path(path)):
            raise click.UsageError(
                f"{path}: expected bundles, found a model repository for Triton: start 'tritonserver --model-repository={path}', or "
                "give the bundle that 'stagepack triton' wrote it from"
            )
    if options.load_names and (options.repository is None or options.control_mode != "explicit"):
        raise click.UsageError("--load-model requires --model-repository and --model-control explicit")


def _is_written_for_triton(folder: Path) -> bool:
    """Whether a folder is what `stagepack triton` has written, or one of the models in it."""
    from stagepack_serving.triton.repository import is_written_by_stagepack  # noqa: PLC0415 - after the arguments are checked

    try:
        return any(map(is_written_by_stagepack, (folder, *folder.iterdir())))
    except OSError:
        return False


def load_names(options: ServeOptions) -> list[str] | None:
    """Return the models that are loaded at the start; None for all."""
    if options.repository is None or options.control_mode != "explicit" or "*" in options.load_names:
        return None
    return list(options.load_names)


def model_control(bundle_paths: Mapping[str, str], options: ServeOptions, models: "ModelRegistry") -> "ModelControl":
    """Return what loads the bundles of the command line."""
    from stagepack_serving.server import model_control as control  # noqa: PLC0415 - after the arguments are checked

    return control.ModelControl(
        models,
        control.fixed_bundles(bundle_paths)
        if options.repository is None
        else functools.partial(control.repository_bundles, options.repository),
        BundleLoading(options, models),
        mode=options.control_mode,
        version_count=options.version_count,
        poll_seconds=options.poll_seconds,
    )
