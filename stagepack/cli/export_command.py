"""`stagepack export`."""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from stagepack.cli.bundle_facts import bundle_facts, print_stages
from stagepack.cli.cut_option_flags import cut_options
from stagepack.cli.onnx_command import onnx_facts, print_onnx
from stagepack.cli.output import fail, finite, print_json, print_line, progress, reports_errors
from stagepack.cli.quantities import format_bytes
from stagepack.cli.run_options import namespaces, replayed
from stagepack.format.writer import check_output_path


@click.command("export")
@click.argument("source")
@click.option("-o", "--out", required=True, type=click.Path(), help="The folder to write.")
@cut_options
@click.option("--inputs", metavar="FILE.py:FUNCTION", help="A function that returns the example inputs.")
@click.option("--onnx", is_flag=True, help="Add ONNX files that use the weights of the bundle.")
@click.option("--overwrite", is_flag=True, help="Replace a bundle that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def command(
    source: str,
    out: str,
    where: Callable[[], Any] | None,
    inputs: str | None,
    onnx: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write SOURCE as a bundle, load it back, and compare it with the model on the example.

    SOURCE is file.py:factory, package.module:factory, a .pt2 file, or a Hugging Face folder or hub name.
    """
    check_output_path(out, overwrite=overwrite)
    started = time.perf_counter()
    # What the model's own code prints goes to standard error: standard output is for our facts alone.
    with progress("import torch") as now, contextlib.redirect_stdout(sys.stderr):
        from stagepack.capture.user_code import capture_source_argument  # noqa: PLC0415 - the same
        from stagepack.exporter import export_capture  # noqa: PLC0415 - torch, after the arguments are checked
        from stagepack.partition.cut_options import CutOptions  # noqa: PLC0415 - the same

        if onnx:
            from stagepack.onnx import add_onnx  # noqa: PLC0415 - packages that only this needs
        now("capture")
        capture = capture_source_argument(source, inputs)
        bundle = export_capture(
            capture, out=out, cut_options=CutOptions() if where is None else where(), overwrite=overwrite, progress=now
        )
        now("load it back and run the example")
        difference = replayed(bundle, allow_ops=namespaces(bundle)).largest
        added = add_onnx(bundle, allow_ops=namespaces(bundle), progress=now) if onnx else None
    seconds = time.perf_counter() - started
    bundle = bundle if added is None else added.bundle
    if as_json:
        print_json(
            bundle_facts(bundle)
            | ({} if added is None else {"onnx": onnx_facts(added)})
            | {"captured_by": capture.method, "difference": finite(difference), "seconds": round(seconds, 3)}
        )
    else:
        size = format_bytes(sum(file.size for file in bundle.manifest.files))
        print_line(f"captured {source} by {capture.method}")
        print_line(f"wrote {out}: {len(bundle.stages)} stages, {size}, in {seconds:.1f} s")
        print_stages(bundle)
        print_line(f"loaded it back and ran the example: largest difference from the model {difference:g}")
        if added is not None:
            print_onnx(onnx_facts(added))
    if finite(difference) is None:
        fail(f"{out}: the bundle answers with other shapes or types than the model")
