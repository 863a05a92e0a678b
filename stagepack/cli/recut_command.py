"""`stagepack recut`."""

import time
from collections.abc import Callable
from typing import Any

import click

from stagepack.cli.bundle_facts import bundle_facts, print_stages
from stagepack.cli.cut_option_flags import cut_options
from stagepack.cli.output import print_json, print_line, progress, reports_errors
from stagepack.cli.quantities import format_bytes
from stagepack.format.reader import Bundle
from stagepack.format.writer import check_output_path


@click.command("recut")
@click.argument("bundle", type=click.Path())
@click.option("-o", "--out", required=True, type=click.Path(), help="The folder to write.")
@cut_options
@click.option("--overwrite", is_flag=True, help="Replace a bundle that is there; it may be BUNDLE itself.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def command(bundle: str, out: str, where: Callable[[], Any] | None, overwrite: bool, as_json: bool) -> None:
    """Write the model of BUNDLE in other stages, with the bytes that an export with this cut has. Needs no torch."""
    if where is None:
        raise click.UsageError("say how to cut: --stages, --split-at or --plan")
    check_output_path(out, overwrite=overwrite)
    started = time.perf_counter()
    with progress("recut"):
        from stagepack.recutter import recut_with_options  # noqa: PLC0415 - numpy, after the arguments are checked

        given = Bundle(bundle)
        made = recut_with_options(given, out=out, cut_options=where(), overwrite=overwrite)
    seconds = time.perf_counter() - started
    if as_json:
        print_json(bundle_facts(made) | {"seconds": round(seconds, 3)})
        return
    size = format_bytes(sum(file.size for file in made.manifest.files))
    print_line(f"wrote {out}: {len(made.stages)} stages, {size}, in {seconds:.1f} s")
    print_stages(made)
    if any(stage.onnx for stage in given.stages):
        print_line(f"the ONNX files are of the old stages and were left out: stagepack onnx {out} makes new ones")
