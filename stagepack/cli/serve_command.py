"""`stagepack serve`."""

import asyncio
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from stagepack.cli.command import subcommand
from stagepack.cli.failures import fail
from stagepack.cli.output import count_of, print_json, print_line, progress, status_line
from stagepack.cli.run_options import batching_text
from stagepack.cli.run_tracing import trace_until_closed
from stagepack.cli.serve_options import (
    ServeOptions,
    bundle_paths_by_name,
    check_options,
    check_security_options,
    check_sources,
)
from stagepack.cli.shared_flags import given_trusted_files, require_packages
from stagepack.named_adapters import named_adapters
from stagepack.remote.url import is_url
from stagepack_loaders.distributed.launch_environment import is_launched_group, launched_rank
from stagepack_loaders.logs import write_log, write_package_log

if TYPE_CHECKING:
    from stagepack_loaders.pipeline import CallablePipeline
    from stagepack_serving.server.model_control import ModelControl
    from stagepack_serving.server.model_registry import ModelRegistry
    from stagepack_serving.server.security import ServerSecurity
    from stagepack_serving.server.served_model import ServedModel
    from stagepack_serving.server.server import ServerAddresses
    from stagepack_serving.server.watched_deltas import WatchedDeltas

_LOGGER: Final = logging.getLogger("stagepack.serve")
# What they log of a request or an error quotes clients and bundles.
_LOGGING_LIBRARIES: Final = ("asyncio", "grpc", "uvicorn")


@subcommand(
    "serve",
    examples=[
        "stagepack serve net.stagepack",
        "stagepack serve net.stagepack --device cuda:0 --max-batch 64",
        "stagepack serve chat=llama.stagepack embed=bert.stagepack --host 0.0.0.0",
        "stagepack serve --model-repository models --model-control poll",
        "stagepack serve net.stagepack --tls-certificate tls.pem --tls-key tls.key",
        "stagepack serve net.stagepack --token-file tokens.txt",
    ],
    forms_group=True,
)
def command(options: ServeOptions) -> None:
    """Serve bundles over the Open Inference Protocol.

    Answers REST and gRPC requests until SIGTERM, SIGHUP or SIGINT. Clients call each model by its NAME, which defaults to the name of the
    folder without .stagepack. Each entry point of a bundle with several is a model, NAME_ENTRYPOINT; BUNDLE#ENTRYPOINT serves one of them
    alone. With --model-repository, bundles are versions of models, and can be replaced while the server runs. Prometheus metrics are at
    /metrics on the HTTP port.
    """
    bundle_paths = bundle_paths_by_name(options.bundle_arguments)
    require_packages(bundle_paths.values(), "serve", *options.runtimes)
    check_sources(bundle_paths, options)
    check_options(bundle_paths, options)
    check_security_options(options)
    _set_up_process(options)
    from stagepack_serving.server.metrics import Metrics  # noqa: PLC0415 - after the arguments are checked
    from stagepack_serving.server.model_registry import ModelRegistry  # noqa: PLC0415 - the same
    from stagepack_serving.server.server import ServerAddresses, check_addresses, serve  # noqa: PLC0415 - the same

    security = server_security(options)
    models = ModelRegistry(options.limits(), Metrics())
    control = _model_control(bundle_paths, options, models)
    addresses = ServerAddresses(
        host=options.host, http_port=options.http_port, grpc_port=options.grpc_port, operator_port=options.operator_port
    )
    if not is_launched_group() or launched_rank() == 0:
        check_addresses(addresses)
    with ExitStack() as closing:
        closing.callback(control.end_processes)
        with progress("loading") as next_step:
            is_front = control.load_at_start(
                options.models_at_start, on_step=lambda model_name: next_step(f"loading {model_name}")
            )
        if not is_front:
            return
        _check_adapters(models, options)
        with status_line() as show:

            def on_listening(bound_addresses: ServerAddresses) -> None:
                _print_listening(bound_addresses, models, options)
                _show_texts(models, show, time.monotonic(), 0)

            is_drained = serve(control, addresses, on_listening, security)
        _print_stopped(models, options.as_json)
        failure = "; ".join(reason for model in models if (reason := model.unavailable_reason()))
        if not is_drained:
            _exit_undrained(models, failure, options)
    if models.has_failed:
        fail(failure)


def _model_control(bundle_paths: Mapping[str, str], options: ServeOptions, models: "ModelRegistry") -> "ModelControl":
    """Return what loads the bundles of the command line."""
    from stagepack_serving.server import bundle_listings  # noqa: PLC0415 - after the arguments are checked
    from stagepack_serving.server.model_control import ModelControl  # noqa: PLC0415 - the same
    from stagepack_serving.server.model_loading import BundleLoading  # noqa: PLC0415 - the same

    def trace(pipeline: "CallablePipeline", closing: ExitStack) -> None:
        if options.trace_file is not None:
            trace_until_closed(pipeline, options.trace_file, closing, quiet=options.as_json)

    for folder in [] if options.repository is None else bundle_listings.misnamed_folders(options.repository):
        _LOGGER.warning("%s: not served: a name has letters, digits and _.- alone", folder)
    return ModelControl(
        models,
        bundle_listings.fixed_bundles(bundle_paths)
        if options.repository is None
        else functools.partial(bundle_listings.repository_bundles, options.repository),
        BundleLoading(options.bundle_options(), models, trace),
        mode=options.control_mode,
        version_policy=options.version_policy,
        poll_seconds=options.poll_seconds,
        trusted_files=given_trusted_files() or (),
        update_folder=options.updates_folder,
        watched_deltas=_watched_deltas(options),
        adapter_folder=options.adapter_folder,
        given_adapters=named_adapters(options.adapters),
    )


def _watched_deltas(options: ServeOptions) -> "WatchedDeltas | None":
    from stagepack_serving.server.watched_deltas import DeltaFolder, DeltaUrl  # noqa: PLC0415 - after the arguments are checked

    if options.watch_deltas is None:
        return None
    return DeltaUrl(options.watch_deltas) if is_url(options.watch_deltas) else DeltaFolder(Path(options.watch_deltas))


def _check_adapters(models: "ModelRegistry", options: ServeOptions) -> None:
    """Refuse adapters that were made for none of the bundles."""
    served = {adapter for model in models for adapter in model.adapters.names}
    unused = [adapter.name for adapter in named_adapters(options.adapters) if adapter.name not in served]
    if unused and options.repository is None:
        fail(
            f"--adapter {unused[0]}: was made for none of the bundles: make it for the one that it belongs to (stagepack adapter)"
        )


def _set_up_process(options: ServeOptions) -> None:
    """Set up libraries before they are imported, here and in processes that are started; then memory and logs of this process."""
    # oneDNN caches compiled code for each input size, 1 MB and more apiece, 1024 by default, which varying sizes fill up. On a CPU,
    # MiniLM is as fast with 64, ResNet-50 within a tenth.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # this command reports errors itself
    if options.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    from stagepack_serving.server.free_memory import limit_arenas  # noqa: PLC0415 - after the arguments are checked

    limit_arenas()
    _write_logs(options)


def _write_logs(options: ServeOptions) -> None:
    """Write the records of this package, of its libraries and of requests to standard error."""
    from stagepack_serving.server.access_log import ACCESS_LOGGER  # noqa: PLC0415 - after the arguments are checked

    write_package_log(options.log_format, options.log_level)
    for library_name in _LOGGING_LIBRARIES:
        write_log(logging.getLogger(library_name), options.log_format, "WARNING")
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_lost_client)
    logging.getLogger("uvicorn.error").addFilter(_is_no_upgrade)
    access_level = "INFO" if options.access_log else "CRITICAL"
    write_log(ACCESS_LOGGER, options.log_format, access_level, "%(asctime)s %(message)s")


def _exit_undrained(models: "ModelRegistry", failure: str, options: ServeOptions) -> NoReturn:
    """End the process at once: threads that still work on abandoned requests would keep it alive."""
    if models.has_failed:
        click.echo(f"error: {failure}", err=True)
    if options.trace_file is not None:
        click.echo(f"{options.trace_file} is not written: requests were still running", err=True)
    sys.stdout.flush()
    os._exit(1 if models.has_failed or any(model.admission.pending_requests for model in models) else 0)


def _is_no_lost_client(record: logging.LogRecord) -> bool:
    """Whether a record of gRPC tells another thing than a client that went away while its answer was sent, which needs no traceback."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core by servicer method")


def _is_no_upgrade(record: logging.LogRecord) -> bool:
    """Whether a record of uvicorn tells another thing than a client that asks for WebSockets: it advises to install them."""
    return not record.getMessage().startswith(("Unsupported upgrade request", "No supported WebSocket library"))


def server_security(options: ServeOptions) -> "ServerSecurity":
    """Read and check the files that the options name. In processes of torchrun that run stages only, the files need not be there."""
    from stagepack_serving.server.security import ServerSecurity, read_security  # noqa: PLC0415 - after the arguments are checked

    if is_launched_group() and launched_rank() != 0:
        return ServerSecurity()
    return read_security(
        tls_certificate=options.tls_certificate,
        tls_key=options.tls_key,
        tls_client_ca=options.tls_client_ca,
        token_file=options.token_file,
    )


def _print_listening(addresses: "ServerAddresses", models: "ModelRegistry", options: ServeOptions) -> None:
    """Print the models and the addresses, when the server accepts requests."""
    if options.as_json:
        ports: dict[str, Any] = asdict(addresses)
        if addresses.operator_port is None:
            del ports["operator_port"]
        print_json(ports | {"models": [_model_facts(model) for model in models.serving]})
        return
    for model in models.serving:
        facts = _model_facts(model)
        devices = " ".join(facts["devices"])
        joining = next(filter(None, (part.joining for part in model.parts.values())), "")
        joining = joining or batching_text(facts["batch"], facts["alone"])
        adapters = f"; adapters {', '.join(model.adapters.names)}" if model.adapters.names else ""
        print_line(f"{model.name}: {count_of('stage', facts['stages'])} on {devices}; {joining}{adapters}")
    host = f"[{addresses.host}]" if ":" in addresses.host else addresses.host
    scheme, encryption = ("http", "") if options.tls_certificate is None else ("https", " with TLS")
    print_line(f"REST on {scheme}://{host}:{addresses.http_port}, gRPC on {host}:{addresses.grpc_port}{encryption}")
    if addresses.operator_port is not None:
        print_line(f"health and metrics on http://{host}:{addresses.operator_port}")


def _show_texts(models: "ModelRegistry", show: Callable[[str | None], None], since: float, counted: int) -> None:
    """Show how many texts are generated, and how fast; again each second."""
    now, token_count = time.monotonic(), models.metrics.token_count
    text_count = sum(part.text_count for model in models for part in model.parts.values())
    rate = (token_count - counted) / max(now - since, 1e-3)
    show(f"{count_of('text', text_count)} under way, {rate:.0f} tokens/s" if text_count else None)
    asyncio.get_running_loop().call_later(1, _show_texts, models, show, now, token_count)


def _print_stopped(models: "ModelRegistry", as_json: bool) -> None:
    """Print how many requests were answered with which status, and what was dropped, after the server stopped."""
    counts, running_count = models.metrics.answer_counts, sum(model.running_count for model in models)
    if as_json:
        dropped = {"requests": models.expired_count, "runs": running_count}
        print_json({"answers": counts, "dropped": dropped})
        return
    line = "stopped: " + (", ".join(f"{count} {status}" for status, count in counts.items()) or "no requests")
    if models.expired_count:
        line += f"; dropped {count_of('request', models.expired_count)} not answered in --drain-s"
    if running_count:
        line += f"; dropped {count_of('run', running_count)} that nobody waited for"
    print_line(line)


def _model_facts(model: "ServedModel") -> dict[str, Any]:
    """Return the facts of a model as plain data."""
    metadata = model.metadata([model.version])
    return {
        "name": model.name,
        "version": model.version,
        "stages": len(model.bundle.stages),
        "devices": model.devices,
        "batch": model.max_batch_size,
        "alone": model.unbatched_reason,
        "inputs": metadata["inputs"],
        "outputs": metadata["outputs"],
    }
