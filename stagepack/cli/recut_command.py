"""`stagepack recut`."""

import time

import click

from stagepack.cli.bundle_facts import bundle_facts, print_written
from stagepack.cli.command import flag, option_object, subcommand
from stagepack.cli.failures import shown_warnings
from stagepack.cli.output import print_json, print_line, progress
from stagepack.cli.shared_flags import JSON, OUT_BUNDLE, BundleOptions, CutFlags, open_argument
from stagepack.cli.termination import orderly_termination
from stagepack.format.writer import check_output_path


@option_object
class _Options(BundleOptions):
    out: str = OUT_BUNDLE
    cut: CutFlags
    overwrite: bool = flag("--overwrite", "Replace an existing bundle, which may be BUNDLE itself.")
    as_json: bool = JSON


@subcommand(
    "recut",
    examples=[
        "stagepack recut net.stagepack --stages 8 -o net8.stagepack",
        "stagepack recut net.stagepack --plan plan.json -o new.stagepack",
    ],
)
def command(options: _Options) -> None:
    """Write a bundle with another cut.

    The new bundle has the same bytes as an export of the model with this cut, without ONNX files. One of --stages, --split-at and
    --plan is required. Needs no torch.
    """
    options.cut.check_recut()
    if not options.cut.has_way:
        raise click.UsageError("Missing a cut option: pass --stages, --split-at or --plan")
    check_output_path(options.out, overwrite=options.overwrite)
    start_time = time.perf_counter()
    with progress("recutting the bundle"), orderly_termination(), shown_warnings():
        from stagepack.roads.recut import recut_with_options  # noqa: PLC0415 - numpy, after the arguments are checked

        old_bundle = open_argument(options.bundle_path)
        new_bundle = recut_with_options(
            old_bundle, out=options.out, cut_options=options.cut.cut_options(), overwrite=options.overwrite
        )
    seconds = time.perf_counter() - start_time
    if options.as_json:
        print_json(bundle_facts(new_bundle) | {"seconds": round(seconds, 3)})
        return
    print_written(new_bundle, options.out, seconds)
    if any(stage.onnx for stage in old_bundle.stages):
        print_line(
            f"ONNX files were not copied, as they belong to the old stages; add new ones with: stagepack onnx {options.out}"
        )
