"""`stagepack report`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stagepack.cli.command import subcommand
from stagepack.cli.cut_option_flags import profile_option
from stagepack.cli.output import format_bytes, print_line
from stagepack.cli.path_options import PathType, bundle_argument, open_argument
from stagepack.cli.report.page import write_report

if TYPE_CHECKING:
    from stagepack_loaders.run_trace import RunTrace


@subcommand(
    "report",
    examples=[
        "stagepack report net.stagepack -o net.html",
        "stagepack load net.stagepack --processes 2 --trace run.json",
        "stagepack report net.stagepack -o net.html --trace run.json",
    ],
)
@bundle_argument
@click.option("-o", "--out", required=True, type=PathType(Path), metavar="FILE", help="HTML file to write.")
@click.option(
    "--trace",
    "trace_file",
    type=PathType(),
    metavar="FILE",
    show_default="none",
    help="Also draw a run of the bundle, which 'stagepack load --trace' has traced, beside the estimated pipeline.",
)
@profile_option
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
def command(bundle_path: str, out: Path, trace_file: str | None, profile_name: str | None, overwrite: bool) -> None:
    """Write a report about a bundle as an HTML page.

    The page shows the stages, the edges between them, the balance, the pipeline bubble and all nodes. It is one file that requests
    nothing from the network. Needs no torch.
    """
    bundle = open_argument(bundle_path)
    write_report(bundle, out=out, profile=profile_name, trace=_read_trace(trace_file), overwrite=overwrite)
    print_line(f"wrote {out}: {format_bytes(out.stat().st_size)}")


def _read_trace(trace_file: str | None) -> "RunTrace | None":
    if trace_file is None:
        return None
    from stagepack_loaders.run_trace import read_trace  # noqa: PLC0415 - only this option needs it

    return read_trace(trace_file)
