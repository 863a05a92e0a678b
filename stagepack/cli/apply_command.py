"""`stagepack apply`."""

import time

import click

from stagepack.cli.bundle_facts import bundle_facts, print_written
from stagepack.cli.command import BundleType, OutputFolderType, argument, flag, option_object, subcommand
from stagepack.cli.failures import shown_warnings
from stagepack.cli.output import print_json, print_line
from stagepack.cli.shared_flags import DIGEST, JSON, open_argument, refuse_url
from stagepack.cli.termination import orderly_termination
from stagepack.format.quantities import format_bytes
from stagepack.format.writer import check_output_path
from stagepack.opening import open_delta


@option_object
class _Options:
    bundle_path: str = argument("OLD", type=BundleType())
    digest: str | None = DIGEST
    deltas: tuple[str, ...] = argument("STEP...", type=BundleType())
    out: str | None = flag("-o, --out FOLDER", "Bundle to write.", type=OutputFolderType())
    in_place: bool = flag("--in-place", "Put the new bundle in the place of OLD.")
    overwrite: bool = flag("--overwrite", "Replace an existing bundle.")
    as_json: bool = JSON


@subcommand(
    "apply",
    examples=[
        "stagepack apply old.stagepack 11.delta 12.delta -o new.stagepack",
        "stagepack apply old.stagepack 11.delta --in-place",
    ],
)
def command(options: _Options) -> None:
    """Write the bundle that deltas make of another one.

    Each STEP is a delta of 'stagepack delta' on the result of the one before, up to 64. The new bundle has the same bytes as the one that
    the last delta was made of; all of them are compared with their digests before it gets its name. Needs no torch.

    With --in-place the new bundle is written beside OLD, and the two are exchanged in one step: at any moment OLD is the old bundle or the
    new one, and what a running pipeline has mapped stays as it is.
    """
    if (options.out is None) != options.in_place:
        raise click.UsageError("expected one of -o FOLDER and --in-place")
    if options.in_place:
        refuse_url(options.bundle_path, "--in-place changes a folder")
    out = options.bundle_path if options.out is None else options.out
    check_output_path(out, overwrite=options.overwrite or options.in_place)
    start_time = time.perf_counter()
    with orderly_termination(), shown_warnings():
        from stagepack.roads.apply_deltas import apply_deltas  # noqa: PLC0415 - numpy, after the arguments are checked

        old_bundle = open_argument(options.bundle_path)
        deltas = [open_delta(path) for path in options.deltas]
        bundle = apply_deltas(old_bundle, deltas, out=out, overwrite=options.overwrite or options.in_place)
    seconds = time.perf_counter() - start_time
    if options.as_json:
        print_json(bundle_facts(bundle) | {"seconds": round(seconds, 3)})
    else:
        print_written(bundle, out, seconds)
        delta_bytes = sum(file.size for delta in deltas for file in delta.listed)
        if delta_bytes > (bundle_bytes := sum(file.size for file in bundle.listed)):
            sizes = f"{format_bytes(delta_bytes)}, the bundle {format_bytes(bundle_bytes)}"
            print_line(f"the deltas have {sizes}: the whole bundle is cheaper to send")
