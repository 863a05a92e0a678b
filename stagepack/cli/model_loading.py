"""The bundles that `stagepack serve` is asked for -> models of the server."""

import functools
import gc
import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stagepack.cli.bundle_facts import each_entry_point
from stagepack.cli.failures import fail
from stagepack.cli.run_options import runtime_of_each_stage, start_processes
from stagepack.cli.run_tracing import trace_until_closed
from stagepack.cli.serve_options import ServeOptions
from stagepack.cli.shared_flags import default_model_name, given_trusted_files
from stagepack.errors import ValueSizeError, named_errors
from stagepack.format.reader import Bundle
from stagepack.opening import open_bundle
from stagepack_loaders.call_limits import Limits
from stagepack_loaders.distributed.launch_environment import is_launched_group
from stagepack_loaders.generation.decoders import generating_entry_point
from stagepack_loaders.options import ProcessOptions

if TYPE_CHECKING:
    from stagepack_loaders.pipeline import CallablePipeline
    from stagepack_serving.server.model_control import ModelControl
    from stagepack_serving.server.model_registry import LoadedBundle, ModelRegistry

_LOGGER: Final = logging.getLogger("stagepack.serve")
# When no call is answered for so many deadlines of requests, a stage hangs, and its process is started again. A slow request alone, which
# holds up those behind it, is no reason to.
_STALLED_DEADLINES = 4


def bundle_paths_by_name(bundle_arguments: tuple[str, ...]) -> dict[str, str]:
    """Return the paths of the bundles by the names that clients call the models."""
    paths: dict[str, str] = {}
    for argument in bundle_arguments:
        model_name, equals, path = argument.partition("=")
        if not equals or "/" in model_name or Path(argument).exists():
            model_name, path = default_model_name(argument), argument
        if not model_name or model_name in paths:
            fail(f"{argument}: expected a distinct name for each model, found {model_name!r}: pass NAME=BUNDLE")
        if not model_name.isprintable():  # protocols have names in UTF-8, and logs have them as they are
            fail(f"{argument}: expected a name of printable characters, found {model_name!r}: pass NAME=BUNDLE")
        paths[model_name] = path
    return paths


class BundleLoading:
    """Loads bundles with the options of `stagepack serve`. Implements `BundleLoader`."""

    def __init__(self, options: ServeOptions, models: "ModelRegistry") -> None:
        self._options = options
        self._models = models
        self._trusted_files = given_trusted_files()
        self._has_libraries = False

    def __call__(self, model_name: str, version: int, path: str, *, unless_digest: str | None) -> "LoadedBundle | None":
        """See `BundleLoader`. None also in a process that torchrun has started to run stages, when the server has ended."""
        from stagepack_serving.server.generation.embedder import add_embedders  # noqa: PLC0415 - after the arguments are checked
        from stagepack_serving.server.generation.generator import add_generators  # noqa: PLC0415 - after the arguments are checked
        from stagepack_serving.server.model_registry import LoadedBundle  # noqa: PLC0415 - the same
        from stagepack_serving.server.served_model import ServedModel  # noqa: PLC0415 - the same

        bundle = open_bundle(path, digest=self._options.digest, require_signature=self._trusted_files)
        if bundle.digest == unless_digest:
            return None
        with named_errors(bundle.location), ExitStack() as closing:
            if not self._has_libraries:
                self._freeze_libraries(models_of_bundle(model_name, bundle).values())
            pipelines = self._load_pipelines(model_name, bundle, closing)
            if pipelines is None:
                return None
            models = []
            for name, pipeline in pipelines.items():
                try:
                    model = ServedModel(
                        name,
                        pipeline,
                        self._models.limits,
                        self._models.metrics,
                        version=str(version),
                        check_example=self._options.check_example,
                    )
                except ValueSizeError as error:
                    message = (
                        f"{pipeline.bundle.location}: the example of the bundle exceeds --max-value-bytes: raise it"
                    )
                    raise ValueSizeError(f"{message} ({error})") from None
                closing.callback(model.close, 0)
                models.append(model)
            add_generators(models)
            add_embedders(models)
            end_processes = closing.pop_all().close
        return LoadedBundle(version=version, digest=bundle.digest, models=models, end_processes=end_processes)

    def _freeze_libraries(self, bundles: Iterable[Bundle]) -> None:
        """Import the libraries of the runtimes, and let the garbage collector look only at what is made after them.

        It collects each version that is closed; with torch, it would look at 200,000 objects, and all threads wait for it: 0.1 s. By itself
        it looks at all objects when a quarter more have come since, which without the libraries a thousand idle calls of gRPC do: it waits
        ten times as long before it does.
        """
        from stagepack_loaders.registry import import_runtime  # noqa: PLC0415 - after the arguments are checked

        for bundle in bundles:
            for runtime_name in runtime_of_each_stage(self._options.runtimes, bundle):
                import_runtime(runtime_name)
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], 10 * gc.get_threshold()[2])
        self._has_libraries = True

    def _load_pipelines(
        self, model_name: str, bundle: Bundle, closing: ExitStack
    ) -> "dict[str, CallablePipeline] | None":
        """Load each entry point, by the name of its model. None in a process that torchrun has started to run stages."""
        options = self._options
        if bundle.selected is None and not (options.processes or is_launched_group()):
            loaded_together = self._load_together(bundle)
            if loaded_together is not None:
                return {f"{model_name}_{name}": pipeline for name, pipeline in loaded_together.items()}
        pipelines = {}
        for name, selected_bundle in models_of_bundle(model_name, bundle).items():
            pipeline = _load_pipeline(selected_bundle, options, closing, deadline=self._models.limits.deadline)
            if pipeline is None:
                return None
            pipelines[name] = pipeline
        return pipelines

    def _load_together(self, bundle: Bundle) -> "dict[str, CallablePipeline] | None":
        """Load entry points so that they share weights. None if they have state: then each has sequences of its own."""
        from stagepack_loaders.entry_points import load_entry_points  # noqa: PLC0415 - after the arguments are checked

        options = self._options
        has_state = any(stage.state for entry_point in bundle.entry_points for stage in entry_point.stages)
        if has_state or len(options.runtimes) > 1:
            return None
        loaded = load_entry_points(
            bundle,
            list(options.devices),
            runtime=options.runtimes[0],
            allow_ops=options.allow_ops,
            verify=options.verify,
            copy=options.weights.copy,
            limits=Limits(value_bytes=options.max_value_bytes),
        )
        return dict(loaded)


def models_of_bundle(model_name: str, bundle: Bundle) -> dict[str, Bundle]:
    """Return the bundle at each entry point that is served, by the names of the models.

    model_name: the name of the bundle; that of the model if one entry point is selected, and that of the decoder if it generates.
    """
    if bundle.selected is not None:
        return {model_name: bundle}
    decoder_name = generating_entry_point(bundle)
    names = {entry_point.name: f"{model_name}_{entry_point.name}" for entry_point in bundle.entry_points}
    if decoder_name is not None:
        names[decoder_name] = model_name
    return {names[selected.entry_point.name]: selected for selected in each_entry_point(bundle)}


def _load_pipeline(
    bundle: Bundle, options: ServeOptions, closing: ExitStack, *, deadline: float
) -> "CallablePipeline | None":
    load_options = options.load_options(runtime_of_each_stage(options.runtimes, bundle))
    if options.processes or is_launched_group():
        pipeline = start_processes(
            bundle,
            options.processes,
            load_options,
            ProcessOptions(imports=options.imports, max_restarts=options.max_restarts),
            Limits(value_bytes=options.max_value_bytes, stall_seconds=_STALLED_DEADLINES * deadline),
        )
        if pipeline is None:
            return None
        closing.enter_context(pipeline)
        if options.trace_file is not None:
            trace_until_closed(pipeline, options.trace_file, closing, quiet=options.as_json)
        return pipeline
    from stagepack_loaders.pipeline import load_pipeline  # noqa: PLC0415 - after the arguments are checked
    from stagepack_loaders.preparation import open_for_loading  # noqa: PLC0415 - the same

    limits = Limits(value_bytes=options.max_value_bytes)
    return load_pipeline(open_for_loading(bundle, options.verify), load_options, (), limits)


def load_names(options: ServeOptions) -> list[str] | None:
    """Return the models that are loaded at the start; None for all."""
    if options.repository is None or options.control_mode != "explicit" or "*" in options.load_names:
        return None
    return list(options.load_names)


def model_control(bundle_paths: Mapping[str, str], options: ServeOptions, models: "ModelRegistry") -> "ModelControl":
    """Return what loads the bundles of the command line."""
    from stagepack_serving.server import model_control as control  # noqa: PLC0415 - after the arguments are checked

    for folder in [] if options.repository is None else control.misnamed_folders(options.repository):
        _LOGGER.warning("%s: not served: a name has letters, digits and _.- alone", folder)
    return control.ModelControl(
        models,
        control.fixed_bundles(bundle_paths)
        if options.repository is None
        else functools.partial(control.repository_bundles, options.repository),
        BundleLoading(options, models),
        mode=options.control_mode,
        version_policy=options.version_policy,
        poll_seconds=options.poll_seconds,
        trusted_files=given_trusted_files() or (),
    )
