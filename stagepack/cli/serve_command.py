"""`stagepack serve`."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import click

from stagepack.cli.output import fail, import_modules, print_json, print_line, progress, reports_errors
from stagepack.cli.run_options import chosen, limit_option, operator_options, runtime_option
from stagepack.format.reader import Bundle
from stagepack_serving.server.limits import Limits


@click.command("serve")
@click.argument("bundles", nargs=-1, required=True, metavar="[NAME=]BUNDLE...")
@click.option("--device", "devices", multiple=True, help="A device a stage in order, or fewer. Default: cpu.")
@runtime_option
@operator_options
@click.option(
    "--compiled", type=click.Path(), help="Run the native code in this folder, which stagepack compile wrote."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0 is everywhere.")
@click.option(
    "--http-port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="For REST; 0 takes a free one."
)
@click.option("--grpc-port", default=8001, show_default=True, type=click.IntRange(0, 65535), help="For gRPC.")
@limit_option("--max-batch", "batch", "Rows of several requests in one run.", least=1)
@limit_option("--max-delay-ms", "delay", "How long to wait for them.", unit=1e-3, most=60_000)
@limit_option("--max-queue", "queue", "Requests to a model not answered yet.", least=1)
@limit_option("--max-connections", "connections", "Connections over HTTP, requests over gRPC.", least=1)
@limit_option("--max-body-mb", "body", "A request, in 10^6 bytes.", unit=1e6, least=1e-3, most=2000)
@limit_option("--deadline-s", "deadline", "How long a request may take.", least=1e-3)
@limit_option("--max-sequences", "sequences", "Sequences that a model keeps the state of.", least=1)
@limit_option("--sequence-idle-s", "idle", "When one may lose its place.")
@limit_option("--linger-s", "linger", "How long requests are still taken after SIGTERM.")
@limit_option("--drain-s", "drain", "For accepted requests, once told to stop.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def command(
    bundles: tuple[str, ...],
    devices: tuple[str, ...],
    runtimes: tuple[str, ...],
    allow_ops: tuple[str, ...],
    imports: tuple[str, ...],
    compiled: str | None,
    host: str,
    http_port: int,
    grpc_port: int,
    as_json: bool,
    **limits: Any,
) -> None:
    """Serve each BUNDLE by the Open Inference Protocol, over REST and gRPC, until SIGTERM or SIGINT.

    Its NAME is that of the folder, less .stagepack. Prometheus finds its figures under /metrics of the HTTP port.
    """
    named = _named(bundles)
    if compiled and len(named) > 1:
        raise click.UsageError("--compiled is of one bundle: serve that one alone")
    opened = {name: Bundle(path) for name, path in named.items()}
    # oneDNN keeps compiled code of each size it has met, 1 MB and more apiece: of 1024 by default, which sizes that vary fill up. On
    # a CPU, MiniLM is as fast with 64, ResNet-50 within a tenth.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is said here
    import_modules(imports)
    from stagepack_loaders.load import load  # noqa: PLC0415 - after the arguments are checked
    from stagepack_serving.server.metrics import Metrics  # noqa: PLC0415 - the same
    from stagepack_serving.server.model import Model  # noqa: PLC0415 - the same
    from stagepack_serving.server.models import Models  # noqa: PLC0415 - the same
    from stagepack_serving.server.server import Addresses, serve  # noqa: PLC0415 - the same

    taken = Limits(**limits)
    metrics = Metrics()
    models = []
    with progress("load") as say:
        for name, bundle in opened.items():
            say(f"load {name}")
            kinds = chosen(runtimes, len(bundle.stages))
            pipeline = load(bundle, list(devices) or ["cpu"], runtime=kinds, allow_ops=allow_ops, compiled=compiled)
            models.append(Model(name, bundle, pipeline, taken, metrics))

    def listening(addresses: Any) -> None:
        if as_json:
            print_json(
                {
                    "host": addresses.host,
                    "http_port": addresses.http_port,
                    "grpc_port": addresses.grpc_port,
                    "models": [_facts(model) for model in models],
                }
            )
            return
        for model in models:
            facts = _facts(model)
            alone = f"each request alone{facts['alone'] and ': ' + facts['alone']}"
            rows = f"up to {facts['batch']} rows at once" if facts["batch"] > 1 else alone
            print_line(f"{model.name}: {facts['stages']} stages on {' '.join(facts['devices'])}, {rows}")
        host = f"[{addresses.host}]" if ":" in addresses.host else addresses.host
        print_line(f"REST on http://{host}:{addresses.http_port}, gRPC on {host}:{addresses.grpc_port}")

    done = asyncio.run(
        serve(Models(models, taken, metrics), Addresses(host=host, http_port=http_port, grpc_port=grpc_port), listening)
    )
    counts = metrics.answers()
    if as_json:
        print_json({"answers": counts})
    else:
        print_line("stopped: " + (", ".join(f"{count} {status}" for status, count in counts.items()) or "no requests"))
    if not done:  # threads that still work on what was given up would keep the process
        sys.stdout.flush()
        os._exit(1 if any(model.pending for model in models) else 0)


def _named(bundles: tuple[str, ...]) -> dict[str, str]:
    """The bundles by the names that clients call them."""
    named: dict[str, str] = {}
    for given in bundles:
        name, equals, path = given.partition("=")
        if not equals or "/" in name or Path(given).exists():
            name, path = Path(given).resolve().name.removesuffix(".stagepack"), given
        if not name or name in named:
            fail(f"{given}: expected a name of its own for each bundle, found {name!r}: write NAME=BUNDLE")
        named[name] = path
    return named


def _facts(model: Any) -> dict[str, Any]:
    """What a model is, as plain data."""
    return {
        "name": model.name,
        "stages": len(model.bundle.stages),
        "devices": model.devices,
        "batch": model.batch,
        "alone": model.alone,
        "inputs": model.metadata()["inputs"],
        "outputs": model.metadata()["outputs"],
    }
