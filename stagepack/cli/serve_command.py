"""`stagepack serve`."""

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from stagepack.cli.command import subcommand
from stagepack.cli.failures import fail
from stagepack.cli.model_loading import ServeOptions, bundle_paths_by_name
from stagepack.cli.output import PrintableFormatter, count_of, print_json, print_line, progress
from stagepack.cli.path_options import PathType, digest_option, given_digest, open_argument, require_packages
from stagepack.cli.repository_options import check_sources, load_names, model_control, repository_options
from stagepack.cli.run_options import (
    batching_text,
    byte_size,
    check_runtimes_compile,
    compiled_option,
    device_memory_option,
    device_option,
    json_option,
    limit_option,
    operator_options,
    processes_option,
    runtime_option,
    signature_option,
    verify_option,
)
from stagepack.cli.security_options import check_security_options, security_options, server_security
from stagepack.format.output_file import check_output_file
from stagepack_loaders.distributed.launch_environment import is_launched_group, launched_rank
from stagepack_serving.server.limits import ServerLimits

if TYPE_CHECKING:
    from stagepack_serving.server.model_registry import ModelRegistry
    from stagepack_serving.server.served_model import ServedModel
    from stagepack_serving.server.server import ServerAddresses

_LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"
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
)
@click.argument("bundle_arguments", nargs=-1, metavar="[NAME=]BUNDLE...")
@repository_options
@digest_option
@device_option
@runtime_option
@partial(operator_options, pass_imports=True)
@compiled_option
@verify_option
@signature_option
@click.option(
    "--copy/--no-copy",
    "copy_weights",
    default=True,
    show_default=True,
    help="With --copy, which is the default, the weights are read into memory. With --no-copy the files are mapped: servers on one machine "
    "share the page cache, and a file that is opened for writing is copied into memory first.",
)
@device_memory_option
@processes_option
@click.option(
    "--max-restarts",
    default=3,
    show_default=True,
    type=click.IntRange(0),
    metavar="N",
    help="With --processes: how often the processes of a model are started again after one of them was lost. Then the server ends.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on; 0.0.0.0 is all interfaces.",
)
@click.option(
    "--http-port",
    default=8000,
    show_default=True,
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Port for REST; 0 chooses a free port.",
)
@click.option(
    "--grpc-port",
    default=8001,
    show_default=True,
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Port for gRPC; 0 chooses a free port.",
)
@security_options
@click.option(
    "--no-check-example",
    "check_example",
    flag_value=False,
    default=True,
    show_default="checked",
    help="Serve bundles also if their examples have other results here than those of the model, which are recorded in them.",
)
@click.option(
    "--trace",
    "trace_file",
    type=PathType(Path),
    metavar="FILE",
    show_default="not written",
    help="With --processes or under torchrun: when the server stops, write what each process did for each batch, from its start on, as "
    "'stagepack load --trace' does.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing file of --trace.")
@click.option(
    "--access-log/--no-access-log",
    default=False,
    show_default=True,
    help="Write a line for each inference to standard error: time, protocol, model, version, status and duration.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    metavar="LEVEL",
    default="info",
    show_default=True,
    help="What is written to standard error: debug, info (versions that are loaded and closed), warning (requests on which a model fails, "
    "processes that are lost), or error (versions that are refused).",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 4096),
    metavar="N",
    show_default="OMP_NUM_THREADS, or one for each processor",
    help="Threads of torch and of ONNX Runtime for one operator on the CPU; with --processes, of each process.",
)
@limit_option(
    "--max-batch",
    "max_batch_size",
    minimum=1,
    metavar="N",
    description="Largest batch size that requests to a model are combined into; 1 runs each request alone.",
)
@limit_option(
    "--max-delay-ms",
    "batching_delay",
    unit=1e-3,
    maximum=60_000,
    metavar="MS",
    description="Batching delay: how long a request waits for others to join its batch, in milliseconds.",
)
@limit_option(
    "--max-queue",
    "max_pending_requests",
    minimum=1,
    metavar="N",
    description="Largest number of requests to a model that wait for an answer; further requests are refused with "
    "status 503 or UNAVAILABLE.",
)
@limit_option(
    "--max-connections",
    "max_connections",
    minimum=1,
    metavar="N",
    description="Largest number of open HTTP connections, of open gRPC connections, and of concurrent gRPC requests.",
)
@limit_option(
    "--first-request-s",
    "first_request",
    minimum=1e-3,
    metavar="SECONDS",
    description="Longest time that a connection may take for its TLS handshake, and for the head of its first request, in seconds.",
)
@limit_option(
    "--max-body-mb",
    "max_request_bytes",
    unit=1e6,
    minimum=1e-3,
    maximum=2000,
    metavar="MB",
    description="Largest size of a request, in megabytes (1 MB is 10^6 bytes).",
)
@click.option(
    "--max-value-bytes",
    metavar="SIZE",
    callback=byte_size,
    show_default="no limit",
    help="Largest size of a value in the model at the sizes of one request, such as 2GiB. Requests at which one would be larger, and "
    "bundles with a larger one at any sizes, are refused.",
)
@limit_option(
    "--deadline-s",
    "deadline",
    minimum=1e-3,
    metavar="SECONDS",
    description="Longest time that a request may take, in seconds.",
)
@limit_option(
    "--max-sequences",
    "max_sequences",
    minimum=1,
    metavar="N",
    description="Largest number of sequences whose state a model keeps.",
)
@limit_option(
    "--sequence-idle-s",
    "sequence_idle",
    metavar="SECONDS",
    description="Idle time after which a sequence is evicted if another one needs its place, in seconds.",
)
@limit_option(
    "--linger-s",
    "linger",
    metavar="SECONDS",
    description="How long new requests are still accepted after SIGTERM or SIGHUP, in seconds.",
)
@limit_option(
    "--drain-s",
    "drain",
    metavar="SECONDS",
    description="How long accepted requests may still take when the server stops, in seconds.",
)
@json_option
def command(bundle_arguments: tuple[str, ...], **arguments: Any) -> None:
    """Serve bundles over the Open Inference Protocol.

    Answers REST and gRPC requests until SIGTERM, SIGHUP or SIGINT. Clients call each model by its NAME, which defaults to the name of the
    folder without .stagepack. Each entry point of a bundle with several is a model, NAME_ENTRYPOINT; BUNDLE#ENTRYPOINT serves one of them
    alone. With --model-repository, bundles are versions of models, and can be replaced while the server runs. Prometheus metrics are at
    /metrics on the HTTP port.
    """
    limits = ServerLimits(**{field.name: arguments.pop(field.name) for field in dataclasses.fields(ServerLimits)})
    options = ServeOptions(**arguments)
    bundle_paths = bundle_paths_by_name(bundle_arguments)
    check_sources(bundle_paths, options)
    _check_options(bundle_paths, options)
    check_security_options(options)
    require_packages(bundle_paths.values(), "serve", *options.runtimes)
    # oneDNN caches compiled code for each input size, 1 MB and more apiece, 1024 by default, which varying sizes fill up. On a CPU,
    # MiniLM is as fast with 64, ResNet-50 within a tenth.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # this command reports errors itself
    if options.threads is not None:  # before torch is imported, and for processes that are started
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    from stagepack_serving.server.metrics import Metrics  # noqa: PLC0415 - after the arguments are checked
    from stagepack_serving.server.model_registry import ACCESS_LOGGER, ModelRegistry  # noqa: PLC0415 - the same
    from stagepack_serving.server.server import ServerAddresses, check_addresses, serve  # noqa: PLC0415 - the same

    _write_log(logging.getLogger("stagepack"), _LOG_FORMAT, options.log_level.upper())
    for library_name in _LOGGING_LIBRARIES:
        _write_log(logging.getLogger(library_name), _LOG_FORMAT, "WARNING")
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_lost_client)
    _write_log(ACCESS_LOGGER, "%(asctime)s %(message)s", "INFO" if options.access_log else "CRITICAL")
    security = server_security(options)
    models = ModelRegistry(limits, Metrics())
    control = model_control(bundle_paths, options, models)
    addresses = ServerAddresses(host=options.host, http_port=options.http_port, grpc_port=options.grpc_port)
    if not is_launched_group() or launched_rank() == 0:
        check_addresses(addresses)
    with ExitStack() as closing:
        closing.callback(control.end_processes)
        with progress("loading") as next_step:
            is_front = control.load_at_start(
                load_names(options), on_step=lambda model_name: next_step(f"loading {model_name}")
            )
        if not is_front:
            return
        is_drained = serve(
            control,
            addresses,
            lambda bound_addresses: _print_listening(bound_addresses, models, options),
            security,
        )
        _print_stopped(models.metrics.answer_counts, options.as_json)
        failure = "; ".join(reason for model in models if (reason := model.unavailable_reason()))
        if not is_drained:  # threads that still work on abandoned requests would keep the process alive
            if models.has_failed:
                click.echo(f"error: {failure}", err=True)
            if options.trace_file is not None:
                click.echo(f"{options.trace_file} is not written: requests were still running", err=True)
            sys.stdout.flush()
            os._exit(1 if models.has_failed or any(model.pending_requests for model in models) else 0)
    if models.has_failed:
        fail(failure)


def _write_log(logger: logging.Logger, line_format: str, level: str) -> None:
    """Write the records of a logger to standard error, and nowhere else."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(line_format))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


def _is_no_lost_client(record: logging.LogRecord) -> bool:
    """Whether a record of gRPC tells another thing than a client that went away while its answer was sent, which needs no traceback."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core by servicer method")


def _check_options(bundle_paths: dict[str, str], options: ServeOptions) -> None:
    """Refuse options of one bundle for several, and options that do not go together."""
    only_path = next(iter(bundle_paths.values())) if len(bundle_paths) == 1 else None
    if options.compiled_folder:
        check_runtimes_compile("--compiled", options.runtimes)
        if only_path is None or open_argument(only_path).selected is None:
            raise click.UsageError(
                "--compiled is the native code of one model: serve one bundle, or one entry point as BUNDLE#NAME"
            )
    if given_digest() and only_path is None:
        raise click.UsageError("--digest is that of one bundle: serve that bundle alone")
    if is_launched_group():
        if only_path is None or options.control_mode != "none":
            raise click.UsageError(
                "under torchrun the processes are those of one bundle: serve that bundle alone, without --model-control"
            )
        if open_argument(only_path).selected is None:
            raise click.UsageError("under torchrun the processes are those of one entry point: give it as BUNDLE#NAME")
    if options.trace_file is not None:
        if not options.processes and not is_launched_group():
            raise click.UsageError("--trace requires --processes, or torchrun")
        if only_path is None or options.control_mode != "none" or open_argument(only_path).selected is None:
            raise click.UsageError(
                "--trace is of one model: serve one bundle, or one entry point as BUNDLE#NAME, without --model-control"
            )
        check_output_file(options.trace_file, overwrite=options.overwrite)
    if options.device_memory is not None:
        _check_device_memory(options)
        if only_path is None or open_argument(only_path).selected is None:
            raise click.UsageError(
                "--device-memory is that of one model: serve one bundle, or one entry point as BUNDLE#NAME"
            )


def _check_device_memory(options: ServeOptions) -> None:
    """Refuse options that do not go with `--device-memory`."""
    if options.processes or is_launched_group():
        raise click.UsageError("--device-memory cannot be used with --processes or torchrun")
    copy_source = click.get_current_context().get_parameter_source("copy_weights")
    if options.copy_weights and copy_source is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("--device-memory cannot be used with --copy")


def _print_listening(addresses: "ServerAddresses", models: "ModelRegistry", options: ServeOptions) -> None:
    """Print the models and the addresses, when the server accepts requests."""
    if options.as_json:
        ports = {"host": addresses.host, "http_port": addresses.http_port, "grpc_port": addresses.grpc_port}
        print_json(ports | {"models": [_model_facts(model) for model in models.serving]})
        return
    for model in models.serving:
        facts = _model_facts(model)
        devices = " ".join(facts["devices"])
        print_line(
            f"{model.name}: {count_of('stage', facts['stages'])} on {devices}; {batching_text(facts['batch'], facts['alone'])}"
        )
    host = f"[{addresses.host}]" if ":" in addresses.host else addresses.host
    scheme, encryption = ("http", "") if options.tls_certificate is None else ("https", " with TLS")
    print_line(f"REST on {scheme}://{host}:{addresses.http_port}, gRPC on {host}:{addresses.grpc_port}{encryption}")


def _print_stopped(counts: Mapping[str, int], as_json: bool) -> None:
    """Print how many requests were answered with which status, after the server stopped."""
    if as_json:
        print_json({"answers": counts})
    else:
        print_line("stopped: " + (", ".join(f"{count} {status}" for status, count in counts.items()) or "no requests"))


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
