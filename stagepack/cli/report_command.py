"""`stagepack report`."""

from pathlib import Path

import click

from stagepack.cli.output import print_line, reports_errors
from stagepack.cli.quantities import format_bytes
from stagepack.cli.report.page import page
from stagepack.errors import OutputExistsError, WriteError
from stagepack.format.reader import Bundle


@click.command("report")
@click.argument("bundle", type=click.Path())
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The HTML file to write.")
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
@reports_errors
def command(bundle: str, out: Path, overwrite: bool) -> None:
    """Draw BUNDLE as one HTML page: its stages, what crosses between them, balance, bubble and nodes. Needs no torch.

    The page asks for nothing from anywhere, and runs no script but its own.
    """
    if out.exists() and not overwrite:
        raise OutputExistsError(f"{out} exists: choose another name, or --overwrite")
    text = page(Bundle(bundle))
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WriteError(f"{out}: could not be written: {error.strerror}") from error
    print_line(f"wrote {out}: {format_bytes(len(text.encode()))}")
