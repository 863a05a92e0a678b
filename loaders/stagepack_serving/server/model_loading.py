"""Bundles, and pipelines that are loaded already -> the models of a server."""

import gc
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from stagepack.errors import ValueSizeError, named_errors
from stagepack.format.reader import Bundle
from stagepack.named_adapters import pinned_adapters
from stagepack.opening import TrustedSigners, open_bundle
from stagepack_loaders.call_limits import Limits
from stagepack_loaders.decoders import generating_entry_point
from stagepack_loaders.distributed.launch_environment import is_launched_group
from stagepack_loaders.entry_points import EntryPointPipelines, load_each_entry_point
from stagepack_loaders.joint_versions import join_versions
from stagepack_loaders.load import start_processes
from stagepack_loaders.local_pipeline import load_pipeline
from stagepack_loaders.options import LoadOptions, ProcessOptions
from stagepack_loaders.pipeline import CallablePipeline
from stagepack_loaders.preparation import open_for_loading
from stagepack_loaders.registry import import_runtime, runtime_of_each_stage
from stagepack_serving.server.extensions import server_extensions
from stagepack_serving.server.metadata import FIRST_VERSION
from stagepack_serving.server.model_registry import LoadedBundle, ModelRegistry
from stagepack_serving.server.served_model import ServedModel

# When no call is answered for so many deadlines of requests, a stage hangs, and its process is started again. A slow request alone, which
# holds up those behind it, is no reason to.
_STALLED_DEADLINES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedBundleOptions:
    """How the bundles of a server are opened and loaded.

    Attributes:
        load: how stages are loaded, in this process or in others.
        processes: how processes of stages run.
        process_count: the number of processes on this machine; None for this process, or those that torchrun has started.
        value_bytes: the largest size of a value, in bytes; None for no limit.
        digest: the digest that a bundle must have.
        trusted_files: the files of those who may have signed a bundle; None for no check.
        check_example: whether a bundle is refused whose example has other results here than those that are recorded.
        loads_adapters: whether bundles take adapters later, too.
    """

    load: LoadOptions
    processes: ProcessOptions
    process_count: int | None = None
    value_bytes: int | None = None
    digest: str | None = None
    trusted_files: TrustedSigners | None = None
    check_example: bool = True
    loads_adapters: bool = False

    @property
    def uses_processes(self) -> bool:
        """Whether stages run in processes of their own."""
        return bool(self.process_count) or is_launched_group()


class PipelineLoading:
    """Serves pipelines that their caller has loaded, and closes. Implements `BundleLoader`."""

    def __init__(self, pipelines: Mapping[str, CallablePipeline | EntryPointPipelines], models: ModelRegistry) -> None:
        self._pipelines = pipelines
        self._models = models

    def __call__(self, model_name: str, version: int, path: str, *, unless_digest: str | None) -> LoadedBundle:
        """See `BundleLoader`."""
        loaded = self._pipelines[model_name]
        pipelines = (
            {model_name: loaded} if isinstance(loaded, CallablePipeline) else _pipelines_by_model(model_name, loaded)
        )
        with ExitStack() as closing:
            models = _served_models(pipelines, self._models, closing, check_example=False)
            closing.pop_all()
        return LoadedBundle(version=version, models=models, end_processes=lambda: None)


class BundleLoading:
    """Loads bundles with the same options. Implements `BundleLoader`.

    on_pipeline: called with each pipeline over processes, and with what is closed when its processes end.
    """

    def __init__(
        self,
        options: ServedBundleOptions,
        models: ModelRegistry,
        on_pipeline: Callable[[CallablePipeline, ExitStack], None] = lambda _, __: None,
    ) -> None:
        self._options = options
        self._models = models
        self._on_pipeline = on_pipeline
        self._has_libraries = False

    def __call__(self, model_name: str, version: int, path: str, *, unless_digest: str | None) -> LoadedBundle | None:
        """See `BundleLoader`. None also in a process that torchrun has started to run stages, when the server has ended."""
        options = self._options
        bundle = open_bundle(path, digest=options.digest, require_signature=options.trusted_files)
        if bundle.digest == unless_digest:
            return None
        with named_errors(bundle.location), ExitStack() as closing:
            if not self._has_libraries:
                self._freeze_libraries(_entry_points_by_model(model_name, bundle).values())
            pipelines = self._load_pipelines(model_name, bundle, closing)
            if pipelines is None:
                return None
            for pipeline in pipelines.values():
                pipeline.trusted_signers = options.trusted_files
            models = _served_models(
                pipelines, self._models, closing, version=str(version), check_example=options.check_example
            )
            end_processes = closing.pop_all().close
        return LoadedBundle(version=version, models=models, end_processes=end_processes)

    def _freeze_libraries(self, bundles: Iterable[Bundle]) -> None:
        """Import the libraries of the runtimes, and let the garbage collector look only at what is made after them.

        It collects each version that is closed; with torch, it would look at 200,000 objects, and all threads wait for it: 0.1 s. By itself
        it looks at all objects when a quarter more have come since, which without the libraries a thousand idle calls of gRPC do: it waits
        ten times as long before it does.
        """
        for bundle in bundles:
            for runtime in runtime_of_each_stage(self._options.load.runtime, bundle):
                import_runtime(runtime.name)
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], 10 * gc.get_threshold()[2])
        self._has_libraries = True

    def _load_pipelines(
        self, model_name: str, bundle: Bundle, closing: ExitStack
    ) -> Mapping[str, CallablePipeline] | None:
        """Load each entry point, by the name of its model. None in a process that torchrun has started to run stages."""
        load = self._load_options(bundle)
        # Entry points share weights; with state, each has sequences of its own.
        has_state = any(stage.state for entry_point in bundle.entry_points for stage in entry_point.stages)
        is_divided = self._options.uses_processes or not isinstance(load.runtime, str)
        if bundle.selected is None and not has_state and not is_divided:
            names = [entry_point.name for entry_point in bundle.entry_points]
            limits = Limits(value_bytes=self._options.value_bytes)
            opened_bundle = open_for_loading(bundle, load.verify)
            loaded = load_each_entry_point(opened_bundle, dict.fromkeys(names, load), (), limits)
            return _pipelines_by_model(model_name, loaded)
        pipelines = {}
        for name, selected_bundle in _entry_points_by_model(model_name, bundle).items():
            pipeline = self._load_pipeline(selected_bundle, load, closing)
            if pipeline is None:
                return None
            pipelines[name] = pipeline
        join_versions([pipeline.executor.updated for pipeline in pipelines.values()])
        return pipelines

    def _load_options(self, bundle: Bundle) -> LoadOptions:
        """The options of a bundle, with the adapters that were made for it."""
        load = self._options.load
        adapters = pinned_adapters(bundle, load.adapters or (), self._options.trusted_files, fitting=True)
        takes_adapters = bool(adapters) or self._options.loads_adapters
        return structs.replace(load, adapters=adapters if takes_adapters else None)

    def _load_pipeline(self, bundle: Bundle, load: LoadOptions, closing: ExitStack) -> CallablePipeline | None:
        options = self._options
        load = structs.replace(load, runtime=[runtime.name for runtime in runtime_of_each_stage(load.runtime, bundle)])
        if not options.uses_processes:
            limits = Limits(value_bytes=options.value_bytes)
            return load_pipeline(open_for_loading(bundle, load.verify), load, (), limits)
        stall_seconds = _STALLED_DEADLINES * self._models.limits.deadline
        limits = Limits(value_bytes=options.value_bytes, stall_seconds=stall_seconds)
        pipeline = start_processes(bundle, options.process_count, load, options.processes, limits)
        if pipeline is not None:
            closing.enter_context(pipeline)
            self._on_pipeline(pipeline, closing)
        return pipeline


def _served_models(
    pipelines: Mapping[str, CallablePipeline],
    models: ModelRegistry,
    closing: ExitStack,
    *,
    version: str = FIRST_VERSION,
    check_example: bool,
) -> list[ServedModel]:
    """Try out pipelines, and make the models of them, with what extensions add; `closing` ends the models."""
    served_models = []
    for name, pipeline in pipelines.items():
        try:
            model = ServedModel(
                name, pipeline, models.limits, models.metrics, version=version, check_example=check_example
            )
        except ValueSizeError as error:
            message = f"{pipeline.bundle.location}: the example of the bundle exceeds --max-value-bytes: raise it"
            raise ValueSizeError(f"{message} ({error})") from None
        closing.callback(model.close, 0)
        served_models.append(model)
    for extension in server_extensions():
        extension.add_parts(served_models)
    for model in served_models:
        checks = model.pipeline.executor.updated.checks
        checks += [part.check_version for part in model.parts.values()]
        closing.callback(checks.clear)
    return served_models


def _entry_points_by_model(model_name: str, bundle: Bundle) -> dict[str, Bundle]:
    """The bundle at each entry point by the name of its model: NAME_ENTRYPOINT; NAME for a selected one, and for one that generates."""
    if bundle.selected is not None:
        return {model_name: bundle}
    decoder_name = generating_entry_point(bundle)
    names = {entry_point.name: f"{model_name}_{entry_point.name}" for entry_point in bundle.entry_points}
    if decoder_name is not None:
        names[decoder_name] = model_name
    return {names[entry_point.name]: bundle.select(entry_point.name) for entry_point in bundle.entry_points}


def _pipelines_by_model(model_name: str, pipelines: EntryPointPipelines) -> dict[str, CallablePipeline]:
    """The pipeline of each entry point, by the name of its model."""
    selected = _entry_points_by_model(model_name, pipelines.bundle)
    return {name: pipelines[bundle.entry_point.name] for name, bundle in selected.items()}
