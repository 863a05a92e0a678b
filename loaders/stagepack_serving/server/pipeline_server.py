"""A server of loaded pipelines: the function `stagepack.serve`."""

import os
from collections.abc import Callable, Mapping

from stagepack.errors import OptionError, StageLostError
from stagepack_loaders.pipeline import CallablePipeline
from stagepack_serving.server.generation.embedder import add_embedders
from stagepack_serving.server.generation.generator import add_generators
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.loaded_bundle import LoadedBundle
from stagepack_serving.server.metrics import Metrics
from stagepack_serving.server.model_control import ModelControl
from stagepack_serving.server.model_repository import FixedBundles
from stagepack_serving.server.security import read_security
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
    tls_certificate: str | os.PathLike[str] | None = None,
    tls_key: str | os.PathLike[str] | None = None,
    tls_client_ca: str | os.PathLike[str] | None = None,
    token_file: str | os.PathLike[str] | None = None,
    check_token: Callable[[str], bool] | None = None,
    on_listening: Callable[[ServerAddresses], None] = lambda _: None,
) -> None:
    """Serve loaded pipelines over the Open Inference Protocol, REST and gRPC, until SIGTERM, SIGHUP or SIGINT. Call it in the main thread.

    Load with ``copy=True``: then no change of the weight files costs a request time.

    Args:
        pipelines: the pipelines by the names that clients call the models.
        host: the address to listen at; ``0.0.0.0`` is all interfaces.
        http_port: the port for REST; 0 chooses a free one.
        grpc_port: the port for gRPC; 0 chooses a free one.
        limits: the limits of the server; None for the default ones.
        tls_certificate: a PEM file with the certificate of the server, and those between it and its authority; None for no encryption.
        tls_key: a PEM file with its private key, which other users must not be able to read.
        tls_client_ca: a PEM file with the authorities whose certificates clients must have; None if clients need none.
        token_file: a file with a token on each line, one of which requests must have; None if they need none.
        check_token: says whether a token is accepted, in the place of `token_file`. It must be quick: it is called in the thread that
            answers all requests.
        on_listening: called with the addresses, free ports filled in, when the server accepts requests.

    Raises:
        OptionError: there is no pipeline, or something else than a pipeline; or arguments for TLS or tokens do not go together.
        CredentialError: a file for TLS or tokens cannot be used.
        StageLostError: a model has ended: its processes were lost, or one of its threads.
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
    security = read_security(
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        token_file=token_file,
        check_token=check_token,
    )
    models = ServedModels(limits or ServerLimits(), Metrics())

    def load_bundle(model_name: str, version: int, path: str, *, unless_digest: str | None) -> LoadedBundle:
        pipeline = pipelines[model_name]
        model = ServedModel(model_name, pipeline.bundle, pipeline, models.limits, models.metrics, check_example=False)
        add_generators([model])
        add_embedders([model])
        return LoadedBundle(version=version, digest=pipeline.bundle.digest, models=[model], end_processes=lambda: None)

    control = ModelControl(models, FixedBundles(dict.fromkeys(pipelines, "")), load_bundle)
    addresses = ServerAddresses(host=host, http_port=http_port, grpc_port=grpc_port)
    try:
        control.load_at_start()
        serve(control, addresses, on_listening, security)
    except BaseException:
        # Without a wait, threads that have nothing left to do could outlive the error.
        control.close(models.limits.drain)
        raise
    if models.has_failed:
        raise StageLostError("; ".join(reason for model in models if (reason := model.unavailable_reason())))
