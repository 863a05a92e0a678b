"""`stagepack report`."""

from pathlib import Path

import click

from stagepack.cli.command import subcommand
from stagepack.cli.output import print_line
from stagepack.cli.path_options import PathType, bundle_argument
from stagepack.cli.quantities import format_bytes
from stagepack.cli.report.page import bundle_page
from stagepack.errors import OutputExistsError, WriteError
from stagepack.format.reader import Bundle


@subcommand("report", examples=["stagepack report net.stagepack -o net.html"])
@bundle_argument
@click.option("-o", "--out", required=True, type=PathType(Path), metavar="FILE", help="HTML file to write.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
def command(bundle_path: str, out: Path, overwrite: bool) -> None:
    """Write a report about a bundle as an HTML page.

    The page shows the stages, the edges between them, the balance, the pipeline bubble and all nodes. It is one file that requests
    nothing from the network. Needs no torch.
    """
    if out.exists() and not overwrite:
        raise OutputExistsError(f"{out} exists: choose another name, or pass --overwrite")
    html = bundle_page(Bundle(bundle_path))
    try:
        out.write_text(html, encoding="utf-8")
    except OSError as error:
        raise WriteError(f"{out}: cannot be written: {error.strerror}") from error
    print_line(f"wrote {out}: {format_bytes(len(html.encode()))}")
