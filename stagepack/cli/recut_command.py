"""`stagepack recut`."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from stagepack.cli.bundle_facts import bundle_facts, print_written
from stagepack.cli.command import subcommand
from stagepack.cli.cut_option_flags import cut_option_flags
from stagepack.cli.failures import shown_warnings
from stagepack.cli.output import print_json, print_line, progress
from stagepack.cli.path_options import PathType, bundle_argument, open_argument
from stagepack.cli.run_options import json_option
from stagepack.cli.termination import orderly_termination
from stagepack.format.writer import check_output_path

if TYPE_CHECKING:
    from stagepack.partition.cut_options import CutOptions


@subcommand(
    "recut",
    examples=[
        "stagepack recut net.stagepack --stages 8 -o net8.stagepack",
        "stagepack recut net.stagepack --plan plan.json -o new.stagepack",
    ],
)
@bundle_argument
@click.option("-o", "--out", required=True, type=PathType(), metavar="FOLDER", help="Bundle to write.")
@cut_option_flags
@click.option("--overwrite", is_flag=True, help="Replace an existing bundle, which may be BUNDLE itself.")
@json_option
def command(
    bundle_path: str,
    out: str,
    make_cut_options: "Callable[[], CutOptions] | None",
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write a bundle with another cut.

    The new bundle has the same bytes as an export of the model with this cut, without ONNX files. One of --stages, --split-at and
    --plan is required. Needs no torch.
    """
    if make_cut_options is None:
        raise click.UsageError("Missing a cut option: pass --stages, --split-at or --plan")
    check_output_path(out, overwrite=overwrite)
    start_time = time.perf_counter()
    with progress("recutting the bundle"), orderly_termination(), shown_warnings():
        from stagepack.recutter import recut_with_options  # noqa: PLC0415 - numpy, after the arguments are checked

        old_bundle = open_argument(bundle_path)
        new_bundle = recut_with_options(old_bundle, out=out, cut_options=make_cut_options(), overwrite=overwrite)
    seconds = time.perf_counter() - start_time
    if as_json:
        print_json(bundle_facts(new_bundle) | {"seconds": round(seconds, 3)})
        return
    print_written(new_bundle, out, seconds)
    if any(stage.onnx for stage in old_bundle.stages):
        print_line(
            f"ONNX files were not copied, as they belong to the old stages; add new ones with: stagepack onnx {out}"
        )
