"""The bundles that `stagepack serve` is asked for -> models of the server."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stagepack.cli.bundle_facts import each_entry_point
from stagepack.cli.failures import fail
from stagepack.cli.output import progress
from stagepack.cli.process_options import start_processes
from stagepack.cli.run_options import default_model_name, runtime_of_each_stage
from stagepack.cli.trace_option import trace_until_closed
from stagepack.format.reader import Bundle
from stagepack_loaders.distributed.launch_environment import is_launched_group
from stagepack_serving.server.limits import ServerLimits

if TYPE_CHECKING:
    from stagepack_loaders.base import Verify
    from stagepack_loaders.callable_pipeline import CallablePipeline
    from stagepack_serving.server.metrics import Metrics
    from stagepack_serving.server.served_model import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `stagepack serve` but the limits, named as they are declared there."""

    devices: tuple[str, ...]
    runtimes: tuple[str, ...]
    allow_ops: tuple[str, ...]
    compiled_folder: str | None
    verify: "Verify"
    copy_weights: bool
    device_memory: str | None
    processes: int | None
    max_restarts: int
    trace_file: Path | None
    imports: tuple[str, ...]
    host: str
    http_port: int
    grpc_port: int
    access_log: bool
    as_json: bool


def bundle_paths_by_name(bundle_arguments: tuple[str, ...]) -> dict[str, str]:
    """Return the paths of the bundles by the names that clients call the models.

    Args:
        bundle_arguments: the arguments of the command line, ``[NAME=]BUNDLE``.
    """
    paths: dict[str, str] = {}
    for argument in bundle_arguments:
        model_name, equals, path = argument.partition("=")
        if not equals or "/" in model_name or Path(argument).exists():
            model_name, path = default_model_name(argument), argument
        if not model_name or model_name in paths:
            fail(f"{argument}: expected a distinct name for each model, found {model_name!r}: pass NAME=BUNDLE")
        paths[model_name] = path
    return paths


def select_entry_points(bundles: dict[str, Bundle]) -> dict[str, Bundle]:
    """Return the bundles by the names of models, those with several entry points as a model for each.

    Args:
        bundles: the opened bundles by name.
    """
    selected_bundles: dict[str, Bundle] = {}
    for model_name, bundle in bundles.items():
        for selected in each_entry_point(bundle):
            name = model_name if bundle.selected is not None else f"{model_name}_{selected.entry_point.name}"
            if name in selected_bundles:
                fail(
                    f"{bundle.location}: expected a distinct name for each model, found {name!r} twice: pass NAME=BUNDLE"
                )
            selected_bundles[name] = selected
    return selected_bundles


def load_models(
    bundles: dict[str, Bundle], options: ServeOptions, limits: ServerLimits, metrics: "Metrics", closing: ExitStack
) -> "list[ServedModel] | None":
    """Load the models.

    Args:
        bundles: the bundles by the names of the models, each at one entry point.
        options: the options of the command line.
        limits: the limits of the server.
        metrics: the metrics of the server.
        closing: ends processes that are started for the models.

    Returns:
        The models; None in a process that torchrun has started to run stages, when the server has ended.
    """
    from stagepack_serving.server.served_model import ServedModel  # noqa: PLC0415 - after the arguments are checked

    models = []
    with progress("loading") as next_step:
        loaded_together = (
            {} if options.processes or is_launched_group() else _load_together(bundles, options, next_step)
        )
        for model_name, bundle in bundles.items():
            next_step(f"loading {model_name}")
            pipeline = loaded_together.get(model_name) or _load_pipeline(
                bundle, options, closing, stall_seconds=limits.deadline
            )
            if pipeline is None:
                return None
            models.append(ServedModel(model_name, bundle, pipeline, limits, metrics))
    return models


def _load_together(
    bundles: dict[str, Bundle], options: ServeOptions, next_step: Callable[[str], None]
) -> "dict[str, CallablePipeline]":
    """Load entry points of one bundle so that they share weights. Those with state are loaded apart: each has sequences of its own."""
    from stagepack_loaders.entry_points import load_entry_points  # noqa: PLC0415 - after the arguments are checked

    pipelines: dict[str, CallablePipeline] = {}
    for digest in dict.fromkeys(bundle.digest for bundle in bundles.values()):
        names = [name for name, bundle in bundles.items() if bundle.digest == digest]
        bundle = bundles[names[0]]
        has_state = any(stage.state for entry_point in bundle.entry_points for stage in entry_point.stages)
        if len(names) < len(bundle.entry_points) or len(names) == 1 or has_state or len(options.runtimes) > 1:
            continue
        next_step(f"loading {', '.join(names)}")
        loaded = load_entry_points(
            bundle,
            list(options.devices),
            runtime=runtime_of_each_stage(options.runtimes, 1)[0],
            allow_ops=options.allow_ops,
            verify=options.verify,
            copy=options.copy_weights,
        )
        pipelines |= {name: loaded[bundles[name].entry_point.name] for name in names}
    return pipelines


def _load_pipeline(
    bundle: Bundle, options: ServeOptions, closing: ExitStack, *, stall_seconds: float
) -> "CallablePipeline | None":
    runtimes = runtime_of_each_stage(options.runtimes, len(bundle.stages))
    if options.processes or is_launched_group():
        pipeline = start_processes(
            bundle,
            options.processes,
            devices=options.devices,
            runtimes=runtimes,
            allow_ops=options.allow_ops,
            imports=options.imports,
            verify=options.verify,
            copy=options.copy_weights,
            compiled_folder=options.compiled_folder,
            max_restarts=options.max_restarts,
            stall_seconds=stall_seconds,
        )
        if pipeline is None:
            return None
        closing.enter_context(pipeline)
        if options.trace_file is not None:
            trace_until_closed(pipeline, options.trace_file, closing, quiet=options.as_json)
        return pipeline
    from stagepack_loaders.load import load  # noqa: PLC0415 - after the arguments are checked

    return load(
        bundle,
        list(options.devices),
        runtime=runtimes,
        allow_ops=options.allow_ops,
        verify=options.verify,
        copy=options.copy_weights and options.device_memory is None,
        compiled=options.compiled_folder,
        device_memory=options.device_memory,
    )
