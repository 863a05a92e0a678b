"""`stagepack triton`."""

from typing import TYPE_CHECKING, Literal

import click

from stagepack.cli.command import OutputFolderType, flag, flag_of, option_object, subcommand
from stagepack.cli.output import print_json, print_line, progress
from stagepack.cli.run_options import DEVICES, RuntimeName, batching_text
from stagepack.cli.shared_flags import (
    ALLOW_OPS,
    IMPORTS,
    JSON,
    BundleOptions,
    check_output_folder,
    default_model_name,
    open_argument,
)
from stagepack.extras import explain_missing_packages
from stagepack.format.reader import Bundle
from stagepack_loaders.decoders import decoder_facts
from stagepack_loaders.registry import TORCH_RUNTIME
from stagepack_serving.server.limits import ServerLimits

if TYPE_CHECKING:
    from stagepack_serving.triton.model_configs import RepositoryOptions


@option_object
class _Options(BundleOptions):
    out: str = flag(
        "-o, --out FOLDER",
        "Model repository to write into; it may contain other models.",
        required=True,
        type=OutputFolderType(),
    )
    model_name: str | None = flag(
        "--name NAME",
        "Name by which clients call the model.",
        default_text="name of the bundle's folder without .stagepack",
    )
    devices: tuple[str, ...] = DEVICES
    runtime: str = flag("--runtime", "Runtime that executes the stages.", type=RuntimeName(), default=TORCH_RUNTIME)
    backend: Literal["python", "onnxruntime"] | None = flag(
        "--backend",
        "Triton backend that runs the stages.",
        default_text="the one named like the runtime, otherwise python",
    )
    allow_ops: tuple[str, ...] = ALLOW_OPS
    imports: tuple[str, ...] = IMPORTS
    max_batch_size: int = flag_of(
        ServerLimits,
        "max_batch_size",
        help="Largest batch size that requests to a model are combined into; 1 runs each request alone.",
    )
    batching_delay: float = flag_of(ServerLimits, "batching_delay")
    max_sequences: int = flag_of(
        ServerLimits, "max_sequences", help="Largest number of sequences whose state a stage keeps."
    )
    sequence_idle: float = flag_of(
        ServerLimits, "sequence_idle", help="Idle time after which a sequence is evicted, in seconds."
    )
    no_check: bool = flag(
        "--no-check", "Do not run the example to check that the rows of a batch do not affect each other."
    )
    copy: bool = flag("--copy", "Copy the files of the bundle instead of hard-linking them.")
    overwrite: bool = flag("--overwrite", "Replace the existing ensemble of the same name and its parts.")
    as_json: bool = JSON


@subcommand(
    "triton",
    examples=[
        "stagepack triton net.stagepack -o models",
        "stagepack triton net.stagepack -o models --device cuda:0 --device cuda:1",
        "stagepack triton net.stagepack -o models --runtime onnxruntime",
        "tritonserver --model-repository=models",
    ],
)
def command(options: _Options) -> None:
    """Write a bundle into a Triton model repository.

    Each stage becomes a model, and an ensemble connects them; clients call the ensemble. Triton's python backend needs stagepack and the
    runtime in the Python environment of the server. Its onnxruntime backend needs neither, and requires ONNX files in the bundle.
    """
    if options.backend not in (None, "python", options.runtime):
        raise click.UsageError(f"--backend {options.backend} requires --runtime {options.backend}")
    bundle = open_argument(options.bundle_path, "triton", options.runtime)
    check_output_folder(options.out)
    with explain_missing_packages("triton"):
        from stagepack_serving.triton.repository import write_repository  # noqa: PLC0415 - after the arguments are checked

    max_batch, reason_without = _largest_batch(bundle, options)
    repository_options = _repository_options(options, max_batch)
    models = write_repository(bundle, options.out, repository_options, overwrite=options.overwrite)
    # Triton's extension needs a model that takes text_input and answers with several responses; an ensemble is one call of the decoder.
    lacks_generate = decoder_facts(bundle.entry_point) is not None
    if options.as_json:
        facts = {"repository": options.out, "models": models, "batch": max_batch, "alone": reason_without or None}
        print_json(facts | ({"generate": None} if lacks_generate else {}))
    else:
        print_line(f"wrote {', '.join(models)} into {options.out}")
        print_line(f"clients call {repository_options.model_name}; {batching_text(max_batch, reason_without)}")
        if lacks_generate:
            print_line(
                "there is no generate: clients drive the decoder, a sequence for each text; stagepack serve has /generate"
            )


def _largest_batch(bundle: Bundle, options: _Options) -> tuple[int, str]:
    """Return the largest batch size, and if it is 1, the reason."""
    from stagepack_loaders.batching import batch_limit  # noqa: PLC0415 - the same
    from stagepack_loaders.load import load  # noqa: PLC0415 - after the arguments are checked
    from stagepack_serving.triton.repository import batching_obstacle  # noqa: PLC0415 - the same

    reason = batching_obstacle(bundle, _backend(options))
    if reason:
        return 1, reason
    with progress("running the example in batches"):
        needs_pipeline = options.max_batch_size > 1 and not options.no_check
        pipeline = load(bundle, runtime=options.runtime, allow_ops=options.allow_ops) if needs_pipeline else None
        return batch_limit(bundle, bundle.edges, options.max_batch_size, pipeline)


def _backend(options: _Options) -> str:
    """The backend of Triton that runs the stages."""
    from stagepack_serving.triton.model_configs import BACKENDS, PYTHON_BACKEND  # noqa: PLC0415 - after the arguments are checked

    return options.backend or (options.runtime if options.runtime in BACKENDS else PYTHON_BACKEND)


def _repository_options(options: _Options, max_batch: int) -> "RepositoryOptions":
    from stagepack_serving.triton.model_configs import RepositoryOptions  # noqa: PLC0415 - after the arguments are checked

    return RepositoryOptions(
        model_name=options.model_name or default_model_name(options.bundle_path),
        devices=options.devices,
        runtime=options.runtime,
        backend=_backend(options),
        max_batch_size=max_batch if max_batch > 1 else 0,
        batching_delay=options.batching_delay,
        max_sequences=options.max_sequences,
        sequence_idle=options.sequence_idle,
        allow_ops=options.allow_ops,
        imports=options.imports,
        copy=options.copy,
    )
