"""`stagepack triton`."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from stagepack.cli.command import subcommand
from stagepack.cli.output import print_json, print_line, progress
from stagepack.cli.path_options import PathType, bundle_argument, check_output_folder, open_argument
from stagepack.cli.run_options import (
    RuntimeName,
    batching_text,
    default_model_name,
    device_option,
    json_option,
    limit_option,
    operator_options,
)
from stagepack.extras import explain_missing_packages
from stagepack.format.reader import Bundle
from stagepack_loaders.registry import TORCH_RUNTIME

if TYPE_CHECKING:
    from stagepack_serving.triton.options import RepositoryOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The options of the command line, named as they are declared below."""

    out: str
    model_name: str | None
    devices: tuple[str, ...]
    runtime: Any
    backend: Any
    allow_ops: tuple[str, ...]
    imports: tuple[str, ...]
    max_batch_size: int
    batching_delay: float
    max_sequences: int
    sequence_idle: float
    no_check: bool
    copy: bool
    overwrite: bool
    as_json: bool


@subcommand(
    "triton",
    examples=[
        "stagepack triton net.stagepack -o models",
        "stagepack triton net.stagepack -o models --device cuda:0 --device cuda:1",
        "stagepack triton net.stagepack -o models --runtime onnxruntime",
        "tritonserver --model-repository=models",
    ],
)
@bundle_argument
@click.option(
    "-o",
    "--out",
    required=True,
    type=PathType(),
    metavar="FOLDER",
    help="Model repository to write into; it may contain other models.",
)
@click.option(
    "--name",
    "model_name",
    metavar="NAME",
    show_default="name of the bundle's folder without .stagepack",
    help="Name by which clients call the model.",
)
@device_option
@click.option(
    "--runtime",
    type=RuntimeName(),
    default=TORCH_RUNTIME,
    show_default=True,
    help="Runtime that executes the stages.",
)
@click.option(
    "--backend",
    type=click.Choice(["python", "onnxruntime"]),
    show_default="the one named like the runtime, otherwise python",
    help="Triton backend that runs the stages.",
)
@functools.partial(operator_options, pass_imports=True)
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
    "--max-sequences",
    "max_sequences",
    minimum=1,
    metavar="N",
    description="Largest number of sequences whose state a stage keeps.",
)
@limit_option(
    "--sequence-idle-s",
    "sequence_idle",
    metavar="SECONDS",
    description="Idle time after which a sequence is evicted, in seconds.",
)
@click.option(
    "--no-check",
    is_flag=True,
    help="Do not run the example to check that the rows of a batch do not affect each other.",
)
@click.option("--copy", is_flag=True, help="Copy the files of the bundle instead of hard-linking them.")
@click.option("--overwrite", is_flag=True, help="Replace the existing ensemble of the same name and its parts.")
@json_option
def command(bundle_path: str, **arguments: Any) -> None:
    """Write a bundle into a Triton model repository.

    Each stage becomes a model, and an ensemble connects them; clients call the ensemble. Triton's python backend needs stagepack and the
    runtime in the Python environment of the server. Its onnxruntime backend needs neither, and requires ONNX files in the bundle.
    """
    options = _Options(**arguments)
    if options.backend not in (None, "python", options.runtime):
        raise click.UsageError(f"--backend {options.backend} requires --runtime {options.backend}")
    bundle = open_argument(bundle_path, "triton", options.runtime)
    check_output_folder(options.out)
    with explain_missing_packages("triton"):
        from stagepack_serving.triton.repository import write_repository  # noqa: PLC0415 - after the arguments are checked

    max_batch, reason_without = _largest_batch(bundle, options)
    repository_options = _repository_options(bundle_path, options, max_batch)
    models = write_repository(bundle, options.out, repository_options, overwrite=options.overwrite)
    if options.as_json:
        facts = {"repository": options.out, "models": models, "batch": max_batch, "alone": reason_without or None}
        print_json(facts)
    else:
        print_line(f"wrote {', '.join(models)} into {options.out}")
        print_line(f"clients call {repository_options.model_name}; {batching_text(max_batch, reason_without)}")


def _largest_batch(bundle: Bundle, options: _Options) -> tuple[int, str]:
    """Return the largest batch size, and if it is 1, the reason."""
    from stagepack_loaders.batching import batch_limit  # noqa: PLC0415 - the same
    from stagepack_loaders.load import load  # noqa: PLC0415 - after the arguments are checked
    from stagepack_serving.triton.repository import batching_obstacle  # noqa: PLC0415 - the same

    reason = batching_obstacle(bundle)
    if reason:
        return 1, reason
    with progress("running the example in batches"):
        needs_pipeline = options.max_batch_size > 1 and not options.no_check
        pipeline = load(bundle, runtime=options.runtime, allow_ops=options.allow_ops) if needs_pipeline else None
        return batch_limit(bundle, bundle.edges, options.max_batch_size, pipeline)


def _repository_options(bundle_path: str, options: _Options, max_batch: int) -> "RepositoryOptions":
    from stagepack_serving.triton.options import BACKENDS, RepositoryOptions  # noqa: PLC0415 - after the arguments are checked

    return RepositoryOptions(
        model_name=options.model_name or default_model_name(bundle_path),
        devices=options.devices,
        runtime=options.runtime,
        backend=options.backend or (options.runtime if options.runtime in BACKENDS else "python"),
        max_batch_size=max_batch if max_batch > 1 else 0,
        batching_delay=options.batching_delay,
        max_sequences=options.max_sequences,
        sequence_idle=options.sequence_idle,
        allow_ops=options.allow_ops,
        imports=options.imports,
        copy=options.copy,
    )
