"""`stagepack triton`."""

from pathlib import Path

import click

from stagepack.cli.output import import_modules, print_json, print_line, progress, reports_errors
from stagepack.cli.run_options import limit_option, operator_options
from stagepack.format.reader import Bundle


@click.command("triton")
@click.argument("bundle", type=click.Path())
@click.option("-o", "--out", required=True, type=click.Path(), help="The model repository; it may hold other models.")
@click.option("--name", help="What clients call the model. Default: the name of the folder, less .stagepack.")
@click.option(
    "--device", "devices", multiple=True, help="A device a stage in order, or fewer: cpu, cuda:N. Default: cpu."
)
@click.option(
    "--runtime",
    type=click.Choice(["torch", "onnxruntime"]),
    default="torch",
    show_default=True,
    help="What runs the stages.",
)
@click.option(
    "--backend",
    type=click.Choice(["python", "onnxruntime"]),
    help="Triton's backend. Default: onnxruntime for that runtime, which then needs no Python, else python.",
)
@operator_options
@limit_option("--max-batch", "batch", "Rows of several requests in one run.", least=1)
@limit_option("--max-delay-ms", "delay", "How long to wait for them.", unit=1e-3, most=60_000)
@limit_option("--max-sequences", "sequences", "Sequences that a stage keeps the state of.", least=1)
@limit_option("--sequence-idle-s", "idle", "When one loses its place.")
@click.option(
    "--no-check",
    is_flag=True,
    help="Do not run the example to see whether rows of a batch keep apart: take it that they do.",
)
@click.option("--copy", is_flag=True, help="Copy the files of the bundle; else they are linked.")
@click.option("--overwrite", is_flag=True, help="Replace models of these names.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def command(
    bundle: str,
    out: str,
    name: str | None,
    devices: tuple[str, ...],
    runtime: str,
    backend: str | None,
    allow_ops: tuple[str, ...],
    imports: tuple[str, ...],
    batch: int,
    delay: float,
    sequences: int,
    idle: float,
    no_check: bool,
    copy: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write BUNDLE as models of a Triton model repository: one a stage, and an ensemble that clients call.

    In the Python backend a stage needs stagepack and its runtime, installed for the server's Python; in Triton's onnxruntime backend none.
    """
    if backend == "onnxruntime" and runtime == "torch":
        raise click.UsageError("--backend onnxruntime runs ONNX files: add --runtime onnxruntime")
    opened = Bundle(bundle)
    import_modules(imports)
    from stagepack_loaders.load import load  # noqa: PLC0415 - after the arguments are checked
    from stagepack_serving.protocol.rows import rows_at_once  # noqa: PLC0415 - the same
    from stagepack_serving.triton.models import Options, why_alone  # noqa: PLC0415 - the same
    from stagepack_serving.triton.repository import write_repository  # noqa: PLC0415 - the same

    pipeline = None
    with progress("check rows"):
        reason = why_alone(opened)
        if not reason and not no_check and batch > 1:
            pipeline = load(opened, runtime=runtime, allow_ops=allow_ops)  # type: ignore[arg-type]
        rows, reason = (1, reason) if reason else rows_at_once(opened, opened.edges, batch, pipeline)
    options = Options(
        name=name or Path(bundle).resolve().name.removesuffix(".stagepack"),
        devices=devices or ("cpu",),
        runtime=runtime,  # type: ignore[arg-type]
        backend=backend or ("onnxruntime" if runtime == "onnxruntime" else "python"),  # type: ignore[arg-type]
        batch=rows if rows > 1 else 0,
        delay=delay,
        sequences=sequences,
        idle=idle,
        allow_ops=allow_ops,
        imports=imports,
        copy=copy,
    )
    models = write_repository(opened, out, options, overwrite=overwrite)
    if as_json:
        print_json({"repository": out, "models": models, "batch": rows, "alone": reason or None})
        return
    print_line(f"wrote {', '.join(models)} into {out}")
    alone = f"each request runs alone{reason and ': ' + reason}"
    print_line(
        f"clients call {options.name}; " + (f"up to {rows} rows of several requests run at once" if rows > 1 else alone)
    )
