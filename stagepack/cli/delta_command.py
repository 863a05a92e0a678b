"""`stagepack delta`."""

import time

from stagepack.cli.command import BundleType, argument, flag, option_object, subcommand
from stagepack.cli.delta_facts import delta_facts, print_delta
from stagepack.cli.failures import shown_warnings
from stagepack.cli.output import print_json, print_line, progress
from stagepack.cli.shared_flags import DELTAS, JSON, open_argument, require_packages
from stagepack.cli.termination import orderly_termination
from stagepack.deltas.document import DELTA_FORMAT, WEIGHT_VERSION_CHARACTERS
from stagepack.format.writer import check_output_path


@option_object
class _Options:
    old_path: str = argument("OLD", type=BundleType())
    new_path: str = argument("NEW", type=BundleType())
    delta_paths: tuple[str, ...] = DELTAS
    out: str = flag("-o, --out FOLDER", "Delta to write.", required=True)
    version: str | None = flag(
        "--version TEXT",
        f"Name of the new version, such as the step of its trainer, of up to {WEIGHT_VERSION_CHARACTERS} characters.",
        default_text="none",
    )
    overwrite: bool = flag("--overwrite", "Replace an existing delta.")
    as_json: bool = JSON


@subcommand(
    "delta",
    examples=[
        "stagepack delta old.stagepack new.stagepack -o step.delta",
        "stagepack delta old.stagepack new.safetensors -o step.delta --version 12",
        "stagepack delta old.stagepack --delta 1.delta weight_v000002 -o 2.delta",
    ],
)
def command(options: _Options) -> None:
    """Write what differs between a bundle and its next version.

    OLD is a bundle, with --delta the one that earlier deltas make of it. NEW is a bundle of the same model, or its new weights: a
    checkpoint of safetensors or of torch, a folder of a distributed checkpoint, a Hugging Face folder, or a delta that Slime or
    ModelExpress has published, for which torch is needed. Files and chunks of equal digests are not read. Of each changed tensor the
    smallest of three codes is stored: the changed elements, the differences of all elements, or the new ones.

    'stagepack apply' makes the new bundle of OLD and the delta, and 'load --delta' loads it without writing it.
    """
    require_packages([options.old_path, options.new_path])
    check_output_path(options.out, overwrite=options.overwrite, document_format=DELTA_FORMAT)
    start_time = time.perf_counter()
    with progress("writing the delta"), orderly_termination(), shown_warnings():
        from stagepack.roads.delta import write_delta  # noqa: PLC0415 - numpy, after the arguments are checked

        delta = write_delta(
            open_argument(options.old_path),
            options.new_path,
            out=options.out,
            version=options.version or "",
            overwrite=options.overwrite,
        )
    seconds = time.perf_counter() - start_time
    if options.as_json:
        print_json(delta_facts(delta) | {"seconds": round(seconds, 3)})
    else:
        print_delta(delta)
        print_line(f"wrote {options.out} in {seconds:.1f} s")
