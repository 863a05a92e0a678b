"""`stagepack compile`."""

import time
from typing import Any

import click

from stagepack.cli.output import import_modules, print_json, print_line, print_table, progress, reports_errors
from stagepack.format.reader import Bundle


@click.command("compile")
@click.argument("bundle", type=click.Path())
@click.option("-o", "--out", required=True, type=click.Path(), help="The folder to write; it must not exist.")
@click.option("--device", default="cpu", show_default=True, help="The device to compile for.")
@click.option("--allow-ops", multiple=True, metavar="NAMESPACE", help="A namespace of custom operators that may run.")
@click.option(
    "--import", "imports", multiple=True, metavar="MODULE", help="A module to import first, which registers them."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def command(
    bundle: str, out: str, device: str, allow_ops: tuple[str, ...], imports: tuple[str, ...], as_json: bool
) -> None:
    """Compile the parts of BUNDLE to native code for one kind of device, each distinct part once.

    The code is for inference, and for this torch and this kind of processor. `stagepack load --compiled FOLDER` runs it.
    """
    opened = Bundle(bundle)
    import_modules(imports)
    started = time.perf_counter()
    with progress("compile") as say:
        from stagepack_loaders.torch.speed import compile_ahead  # noqa: PLC0415 - torch, after the arguments are checked

        parts = compile_ahead(opened, out, device, allow_ops=allow_ops, progress=say)
    seconds = round(time.perf_counter() - started, 3)
    rows: list[dict[str, Any]] = [
        {
            "part": f"{name or 'all'} of stage {number}",
            "more": len(part.places) - 1,
            "file": part.file or None,
            "reason": part.reason or None,
        }
        for part in parts
        for number, name in part.places[:1]
    ]
    if as_json:
        print_json({"bundle": bundle, "out": out, "parts": rows, "seconds": seconds})
        return
    table = [
        [row["part"], str(row["more"]), row["file"] or f"not compiled, runs as it is: {row['reason']}"] for row in rows
    ]
    print_table("parts", ["part", "#more stages", "code"], table)
    print_line(f"wrote {out}: {sum(bool(part.file) for part in parts)} of {len(parts)} parts, in {seconds:.1f} s")
