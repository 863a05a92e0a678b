"""`stagepack verify`."""

import click

from stagepack.cli.output import fail, finite, import_modules, print_json, print_line, progress, reports_errors
from stagepack.cli.run_options import chosen, operator_options, replayed, runtime_option
from stagepack.errors import FormatError
from stagepack.format.reader import Bundle


@click.command("verify")
@click.argument("bundle", type=click.Path())
@click.option("--run", is_flag=True, help="Also load the bundle and replay its example.")
@runtime_option
@operator_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def command(
    bundle: str,
    run: bool,
    runtimes: tuple[str, ...],
    allow_ops: tuple[str, ...],
    imports: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check every file of BUNDLE against its digest, and every rule of the format.

    With --run, the result of the example must have the shapes and types of the model's, and no other NaN. In ONNX Runtime it must
    also be within a tolerance that depends on its type.
    """
    if runtimes and not run:
        raise click.UsageError("--runtime says where to run the example: give --run too")
    facts: dict[str, object] = {"bundle": bundle, "ok": True, "problems": []}
    try:
        with progress("verify"):
            opened = Bundle(bundle)
            opened.verify()
    except FormatError as error:
        if as_json:
            problems = [
                {"rule": problem.rule, "where": problem.where, "message": problem.message} for problem in error.problems
            ]
            print_json(facts | {"ok": False, "problems": problems})
        fail(f"{bundle}: {error}")
    import_modules(imports)
    difference, same = None, True
    if run:
        kinds = chosen(runtimes, len(opened.stages))
        with progress("run the example"):
            difference, within = replayed(opened, runtimes=kinds, allow_ops=allow_ops)
        same = finite(difference) is not None and (within or set(kinds) == {"torch"})
    if as_json:
        print_json(
            facts
            | {"ok": same, "digest": opened.digest, "files": len(opened.files) + 1}
            | ({} if difference is None else {"difference": finite(difference)})
        )
    else:
        print_line(f"{bundle}: {len(opened.files) + 1} files and all rules hold, sha256 {opened.digest}")
        if difference is not None:
            print_line(f"example: largest difference {difference:g}")
    if not same:
        fail(f"{bundle}: the bundle answers its example with other shapes, types or values than the model did")
