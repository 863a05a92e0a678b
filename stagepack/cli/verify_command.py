"""`stagepack verify`."""

import click

from stagepack.cli.output import fail, finite, import_modules, print_json, print_line, progress, reports_errors
from stagepack.errors import FormatError
from stagepack.format.reader import Bundle


@click.command("verify")
@click.argument("bundle", type=click.Path())
@click.option("--run", is_flag=True, help="Also load the bundle and replay its example (needs torch).")
@click.option("--allow-ops", multiple=True, metavar="NAMESPACE", help="A namespace of custom operators that may run.")
@click.option(
    "--import", "imports", multiple=True, metavar="MODULE", help="A module to import first, which registers them."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def command(bundle: str, run: bool, allow_ops: tuple[str, ...], imports: tuple[str, ...], as_json: bool) -> None:
    """Check every file of BUNDLE against its digest, and every rule of the format."""
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
    difference = _replay(opened, allow_ops) if run else None
    same = difference is None or finite(difference) is not None
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


def _replay(bundle: Bundle, allow_ops: tuple[str, ...]) -> float:
    from stagepack_loaders.load import load  # noqa: PLC0415 - torch is needed for --run alone
    from stagepack_loaders.torch.example import replay  # noqa: PLC0415 - the same

    with progress("run the example"):
        return replay(load(bundle, allow_ops=allow_ops, verify=False), bundle)
