"""A server of loaded pipelines: the function `stagepack.serve`."""

import asyncio
from collections.abc import Callable, Mapping

from stagepack.errors import OptionError, StageLostError
from stagepack_loaders.callable_pipeline import CallablePipeline
from stagepack_serving.server.generation.generator import add_generators
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.loaded_bundle import LoadedBundle
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.model_control import ModelControl
from stagepack_serving.server.model_repository import FixedBundles
from stagepack_serving.server.served_model import ServedModel
from stagepack_serving.server.served_models import ServedModels
from stagepack_serving.server.server import ServerAddresses, serve


def serve_pipelines(
    pipelines: Mapping[str, CallablePipeline],
    *,
    host: str = "127.0.0.1",
    http_port: int = 8000,
    grpc_port: int = 8001,
    limits: ServerLimits | None = None,
    on_listening: Callable[[ServerAddresses], None] = lambda _: None,
) -> None:
    """Serve loaded pipelines over the Open Inference Protocol, REST and gRPC, until SIGTERM, SIGHUP or SIGINT. Call it in the main thread.

    Load with ``copy=True`` what should outlive changes of the weight files.

    Args:
        pipelines: the pipelines by the names that clients call the models.
        host: the address to listen at; ``0.0.0.0`` is all interfaces.
        http_port: the port for REST; 0 chooses a free one.
        grpc_port: the port for gRPC; 0 chooses a free one.
        limits: the limits of the server; None for the default ones.
        on_listening: called with the addresses, free ports filled in, when the server accepts requests.

    Raises:
        OptionError: there is no pipeline, or something else than a pipeline.
        StageLostError: a model with stages in processes of their own has ended.
        AddressError: the server cannot listen at an address.

    Examples:
        >>> stagepack.serve({"minilm": stagepack.load("minilm.stagepack", copy=True)})
    """
    if not pipelines:
        raise OptionError("pipelines: expected at least one, found none")
    for name, pipeline in pipelines.items():
        if not isinstance(pipeline, CallablePipeline):
            raise OptionError(
                f"pipelines: expected a pipeline that stagepack.load returns for {name!r}, found {type(pipeline).__name__}"
            )
    models = ServedModels(limits or ServerLimits(), Metrics())

    def load_bundle(model_name: str, version: int, path: str, *, unless_digest: str | None) -> LoadedBundle:
        pipeline = pipelines[model_name]
        model = ServedModel(model_name, pipeline.bundle, pipeline, models.limits, models.metrics, check_example=False)
        add_generators([model])
        return LoadedBundle(version=version, digest=pipeline.bundle.digest, models=[model], end_processes=lambda: None)

    control = ModelControl(models, FixedBundles(dict.fromkeys(pipelines, "")), load_bundle)
    control.load_at_start()
    asyncio.run(serve(control, ServerAddresses(host=host, http_port=http_port, grpc_port=grpc_port), on_listening))
    if models.has_failed:
        raise StageLostError("; ".join(reason for model in models if (reason := model.unavailable_reason())))
