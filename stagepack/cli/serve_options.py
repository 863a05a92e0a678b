"""The options of `stagepack serve`, and which of them go together."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from msgspec import structs

from stagepack.cli.command import (
    ByteSize,
    Number,
    argument,
    flag,
    flag_of,
    flags_of,
    is_given,
    only_with,
    option_object,
)
from stagepack.cli.failures import fail
from stagepack.cli.run_options import (
    COMPILED,
    DEVICES,
    PLACEMENT,
    PROCESSES,
    RUNTIMES,
    VERIFY,
    check_arriving,
    check_runtimes_compile,
)
from stagepack.cli.shared_flags import (
    ALLOW_OPS,
    DIGEST,
    IMPORTS,
    JSON,
    SIGNATURE,
    default_model_name,
    given_trusted_files,
    open_argument,
)
from stagepack.format.output_file import check_output_file
from stagepack.remote.url import is_url
from stagepack_loaders.distributed.launch_environment import is_launched_group
from stagepack_loaders.options import LoadOptions, OnLoss, PlacementOptions, ProcessOptions, Verify, WeightOptions
from stagepack_serving.server.limits import ServerLimits, VersionPolicy

if TYPE_CHECKING:
    from stagepack_serving.server.model_loading import ServedBundleOptions


class _VersionPolicyType(click.ParamType[VersionPolicy]):
    """``latest``, ``latest:N``, ``specific:N[,N...]`` or ``all``."""

    name = "policy"

    def convert(
        self, value: str | VersionPolicy, param: click.Parameter | None, ctx: click.Context | None
    ) -> VersionPolicy:
        """Convert a value of the command line."""
        if isinstance(value, VersionPolicy):
            return value
        number = "[1-9][0-9]{0,17}"
        match = re.fullmatch(rf"latest(?::([1-9][0-9]{{0,5}}))?|specific:({number}(?:,{number})*)|all", value)
        if match is None:
            self.fail(f"expected latest, latest:N, specific:N,N or all, found {value!r}.", param, ctx)
        if match[2]:
            return VersionPolicy(specific=frozenset(map(int, match[2].split(","))))
        return VersionPolicy(newest_count=None if value == "all" else int(match[1] or 1))


@option_object
class ServeOptions:
    """What `stagepack serve` is asked for; the limits are named as in `ServerLimits`."""

    bundle_arguments: tuple[str, ...] = argument("[NAME=]BUNDLE...", required=False)
    repository: Path | None = flag(
        "--model-repository FOLDER",
        "Serve the models in FOLDER, in which FOLDER/NAME/VERSION is a bundle, as Triton has it; versions are numbers.",
        default_text="bundles as arguments",
    )
    control_mode: Literal["none", "explicit", "poll"] = flag(
        "--model-control MODE",
        "Who decides after the start what is loaded. none: nobody. explicit: clients, by the requests 'load' and 'unload'. "
        "poll: changes of the bundles.",
        default="none",
    )
    load_names: tuple[str, ...] = flag(
        "--load-model NAME",
        "With --model-repository and --model-control explicit: a model to load at the start; '*' is all. Repeatable.",
        default_text="none",
    )
    poll_seconds: float = flag(
        "--poll-s SECONDS",
        "With --model-control poll: time between two looks at the bundles, in seconds.",
        type=Number(0.1, 86_400),
        default=15,
    )
    update_folder: Path | None = flag(
        "--update-folder FOLDER",
        "Folder of deltas, and of bundles with the same graphs, that the weights of models may be updated to while they answer. With "
        "--model-control explicit, clients ask for that by their names ('update'). FOLDER/NAME is the folder of one model.",
        default_text="none",
    )
    watch_deltas: str | None = flag(
        "--watch-deltas FOLDER|URL",
        "As --update-folder; and a delta on the bundle that a model runs is taken as soon as it is in FOLDER. Of a URL, such as "
        "s3://BUCKET/DELTAS, clients choose nothing, and a delta is at URL/DIGEST, where DIGEST is that of its base.",
        default_text="none",
    )
    version_policy: VersionPolicy = only_with(
        flag(
            "--version-policy POLICY",
            "The versions of each model that are served: latest, the N newest as latest:N, certain ones as specific:N,N, or all.",
            type=_VersionPolicyType(),
            default="latest",
        ),
        "--model-repository",
    )
    digest: str | None = DIGEST
    devices: tuple[str, ...] = DEVICES
    placement: PlacementOptions = PLACEMENT
    runtimes: tuple[str, ...] = RUNTIMES
    allow_ops: tuple[str, ...] = ALLOW_OPS
    imports: tuple[str, ...] = IMPORTS
    compiled_folder: str | None = COMPILED
    adapters: tuple[str, ...] = flag_of(LoadOptions, "adapters")
    adapter_folder: Path | None = flag(
        "--adapter-folder FOLDER",
        "Folder of adapters that may be loaded over the models while they answer: FOLDER/NAME. With --model-control explicit, clients load "
        "and unload them by their names ('load', or vLLM's 'load_lora_adapter'); with poll, those in the folder are loaded.",
        default_text="none",
    )
    verify: Verify = VERIFY
    trusted_files: tuple[str, ...] = SIGNATURE
    weights: WeightOptions = flags_of(
        WeightOptions,
        copy=flag(
            "--copy/--no-copy",
            "With --copy, which is the default, the weights are read into memory. With --no-copy the files are mapped: servers on one "
            "machine share the page cache, and a file that is opened for writing is copied into memory first.",
            default=True,
        ),
        stream=None,
    )
    processes: int | None = PROCESSES
    max_restarts: int = only_with(
        flag_of(ProcessOptions, "max_restarts", type=click.IntRange(0), default=3), "--processes"
    )
    on_loss: OnLoss = only_with(flag_of(ProcessOptions, "on_loss"), "--processes")
    host: str = flag("--host ADDRESS", "Address to listen on; 0.0.0.0 is all interfaces.", default="127.0.0.1")
    http_port: int = flag(
        "--http-port PORT", "Port for REST; 0 chooses a free port.", type=click.IntRange(0, 65535), default=8000
    )
    grpc_port: int = flag(
        "--grpc-port PORT", "Port for gRPC; 0 chooses a free port.", type=click.IntRange(0, 65535), default=8001
    )
    operator_port: int | None = flag(
        "--operator-port PORT",
        "Port for health and metrics alone, without TLS and tokens: probes and Prometheus are answered there whatever load the other ports "
        "have. 0 chooses a free port.",
        type=click.IntRange(0, 65535),
        default_text="none",
    )
    tls_certificate: Path | None = flag(
        "--tls-certificate FILE",
        "PEM file with the certificate of the server, and those between it and its authority: REST and gRPC are encrypted by TLS.",
        default_text="no encryption",
    )
    tls_key: Path | None = flag(
        "--tls-key FILE",
        "With --tls-certificate: PEM file with its private key, which other users must not be able to read.",
    )
    tls_client_ca: Path | None = flag(
        "--tls-client-ca FILE",
        "With --tls-certificate: PEM file with certificate authorities; clients need a certificate of one of them.",
        default_text="clients need no certificate",
    )
    token_file: Path | None = flag(
        "--token-file FILE",
        "File with a token on each line. Requests, but those for the health of the server, need one of them: "
        "'Authorization: Bearer TOKEN'.",
        default_text="no token",
    )
    check_example: bool = flag(
        "--no-check-example",
        "Serve bundles also if their examples have other results here than the recorded results of the model.",
        default_text="checked",
        flag_value=False,
        default=True,
    )
    trace_file: Path | None = flag(
        "--trace FILE",
        "With --processes or under torchrun: when the server stops, write what each process did for each batch, from its start on, as "
        "'stagepack load --trace' does.",
        default_text="not written",
    )
    overwrite: bool = only_with(flag("--overwrite", "Replace an existing file of --trace."), "--trace")
    access_log: bool = flag(
        "--access-log/--no-access-log",
        "Write a line for each request to standard error, but those for the health of the server: protocol, model, version, status, times, "
        "client, path, sizes and trace.",
        default=False,
    )
    log_format: Literal["text", "json"] = flag(
        "--log-format",
        "How records are written to standard error, here and in the processes of stages: lines of text, or of JSON.",
        default="text",
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "--log-level LEVEL",
        "What is written to standard error: debug, info (versions that are loaded and closed), warning (requests on which a model fails, "
        "processes that are lost), or error (versions that are refused).",
        default="info",
    )
    threads: int | None = flag(
        "--threads N",
        "Threads of torch and of ONNX Runtime for one operator on the CPU; with --processes, of each process.",
        default_text="OMP_NUM_THREADS, or one for each processor",
        type=click.IntRange(1, 4096),
    )
    max_batch_size: int = flag_of(ServerLimits, "max_batch_size")
    exact: bool = flag(
        "--exact",
        "Run each request, and generate each text, alone, as --max-batch 1 does: what it answers then has the same bits whatever else is "
        "asked. In a batch, they may differ by rounding.",
    )
    batching_delay: float = flag_of(ServerLimits, "batching_delay")
    max_pending_requests: int = flag_of(ServerLimits, "max_pending_requests")
    max_connections: int = flag_of(ServerLimits, "max_connections")
    first_request: float = flag_of(ServerLimits, "first_request")
    max_request_bytes: int = flag_of(ServerLimits, "max_request_bytes")
    max_value_bytes: int | None = flag(
        "--max-value-bytes SIZE",
        "Largest size of a value in the model at the sizes of one request, such as 2GiB. Requests at which one would be larger, and "
        "bundles with a larger one at any sizes, are refused.",
        default_text="no limit",
        type=ByteSize(),
    )
    deadline: float = flag_of(ServerLimits, "deadline")
    max_waiting_tokens: int = flag_of(ServerLimits, "max_waiting_tokens")
    max_sequences: int = flag_of(ServerLimits, "max_sequences")
    sequence_idle: float = flag_of(ServerLimits, "sequence_idle")
    linger: float = flag_of(ServerLimits, "linger")
    drain: float = flag_of(ServerLimits, "drain")
    as_json: bool = JSON

    def bundle_options(self) -> "ServedBundleOptions":
        """Return how the bundles are opened and loaded."""
        from stagepack_serving.server.model_loading import ServedBundleOptions  # noqa: PLC0415 - after the arguments are checked

        # Weights that come while a stage runs are not copied, whatever the default.
        weights = structs.replace(self.weights, copy=self.weights.copy and self.weights.arriving is None)
        load = LoadOptions(
            devices=self.devices,
            runtime=self.runtimes[0] if len(self.runtimes) == 1 else self.runtimes,
            allow_ops=self.allow_ops,
            verify=self.verify,
            compiled=self.compiled_folder,
            adapters=self.adapters or (None if self.adapter_folder is None else ()),
            placement=self.placement,
            **structs.asdict(weights),
        )
        return ServedBundleOptions(
            load=load,
            processes=ProcessOptions(imports=self.imports, max_restarts=self.max_restarts, on_loss=self.on_loss),
            process_count=self.processes,
            value_bytes=self.max_value_bytes,
            digest=self.digest,
            trusted_files=given_trusted_files(),
            check_example=self.check_example,
            loads_adapters=self.adapter_folder is not None,
        )

    @property
    def updates_folder(self) -> Path | None:
        """The folder of the versions that clients choose from."""
        if self.watch_deltas is not None and not is_url(self.watch_deltas):
            return Path(self.watch_deltas)
        return self.update_folder

    @property
    def models_at_start(self) -> list[str] | None:
        """The models that are loaded at the start; None for all."""
        if self.repository is None or self.control_mode != "explicit" or "*" in self.load_names:
            return None
        return list(self.load_names)

    def limits(self) -> ServerLimits:
        """Return the limits of the server."""
        values = {field.name: getattr(self, field.name) for field in fields(ServerLimits)}
        return ServerLimits(**values | ({"max_batch_size": 1} if self.exact else {}))


def bundle_paths_by_name(bundle_arguments: Iterable[str]) -> dict[str, str]:
    """Return the paths of the bundles by the names that clients call the models."""
    paths: dict[str, str] = {}
    for named_path in bundle_arguments:
        model_name, equals, path = named_path.partition("=")
        if not equals or "/" in model_name or Path(named_path).exists():
            model_name, path = default_model_name(named_path), named_path
        if not model_name:
            fail(f"{named_path}: expected NAME=BUNDLE, found an empty name")
        if model_name in paths:
            fail(f"{named_path}: expected a distinct name for each model, found {model_name!r}: pass NAME=BUNDLE")
        if not model_name.isprintable():  # protocols have names in UTF-8, and logs have them as they are
            fail(f"{named_path}: expected a name of printable characters, found {model_name!r}: pass NAME=BUNDLE")
        paths[model_name] = path
    return paths


def check_sources(bundle_paths: Mapping[str, str], options: ServeOptions) -> None:
    """Refuse bundles beside a model repository, neither of them, and options of a mode of control that is not chosen."""
    if options.update_folder and options.watch_deltas and not is_url(options.watch_deltas):
        raise click.UsageError("--update-folder and --watch-deltas exclude each other: give one folder")
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
    if options.adapter_folder and options.control_mode == "none":
        raise click.UsageError("--adapter-folder requires --model-control explicit or poll")
    keeps_adapters = options.adapters and options.control_mode != "explicit"
    if options.watch_deltas and (keeps_adapters or (options.adapter_folder and options.control_mode == "poll")):
        raise click.UsageError("--watch-deltas takes no delta while adapters are loaded: pass --model-control explicit")
    if options.load_names and (options.repository is None or options.control_mode != "explicit"):
        raise click.UsageError("--load-model requires --model-repository and --model-control explicit")
    if is_given("poll_seconds") and options.control_mode != "poll":
        raise click.UsageError("--poll-s requires --model-control poll")


def _is_written_for_triton(folder: Path) -> bool:
    """Whether a folder is what `stagepack triton` has written, or one of the models in it."""
    from stagepack_serving.triton.repository import is_written_by_stagepack  # noqa: PLC0415 - after the arguments are checked

    try:
        return any(map(is_written_by_stagepack, (folder, *folder.iterdir())))
    except OSError:
        return False


def check_security_options(options: ServeOptions) -> None:
    """Refuse options of TLS that do not go together."""
    if (options.tls_certificate is None) != (options.tls_key is None):
        raise click.UsageError("--tls-certificate and --tls-key require each other")
    if options.tls_client_ca is not None and options.tls_certificate is None:
        raise click.UsageError("--tls-client-ca requires --tls-certificate")


def _check_batching(options: ServeOptions) -> None:
    if options.exact and options.max_batch_size > 1 and is_given("max_batch_size"):
        raise click.UsageError("--exact cannot be used with --max-batch above 1")
    if (options.exact or options.max_batch_size == 1) and options.batching_delay > 0 and is_given("batching_delay"):
        reason = "--exact" if options.exact else "--max-batch 1"
        raise click.UsageError(f"--max-delay-ms has no effect with {reason}, which batches no requests: leave it out")


def check_options(bundle_paths: dict[str, str], options: ServeOptions) -> None:
    """Refuse options of one bundle for several, and options that do not go together."""
    only_path = next(iter(bundle_paths.values())) if len(bundle_paths) == 1 else None
    if options.compiled_folder:
        check_runtimes_compile("--compiled", options.runtimes)
        if only_path is None or open_argument(only_path).selected is None:
            raise click.UsageError(
                "--compiled is the native code of one model: serve one bundle, or one entry point as BUNDLE#NAME"
            )
    _check_batching(options)
    if options.digest and only_path is None:
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
    arriving = check_arriving(options.weights, in_processes=bool(options.processes) or is_launched_group())
    if arriving is not None:
        if options.weights.copy and is_given("copy"):
            raise click.UsageError(f"{arriving} cannot be used with --copy")
        if only_path is None or open_argument(only_path).selected is None:
            raise click.UsageError(
                f"{arriving} is that of one model: serve one bundle, or one entry point as BUNDLE#NAME"
            )
