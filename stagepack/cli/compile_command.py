"""`stagepack compile`."""

import time
from typing import Any

import click

from stagepack.cli.command import subcommand
from stagepack.cli.output import print_json, print_line, print_table, progress
from stagepack.cli.path_options import PathType, bundle_argument, check_output_folder, open_argument
from stagepack.cli.run_options import json_option, operator_options
from stagepack.cli.termination import orderly_termination


@subcommand(
    "compile",
    examples=[
        "stagepack compile net.stagepack -o net.compiled --device cuda",
        "stagepack load net.stagepack --device cuda --compiled net.compiled",
    ],
)
@bundle_argument
@click.option(
    "-o", "--out", required=True, type=PathType(), metavar="FOLDER", help="Folder to write; it must not exist."
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="DEVICE",
    help="Device of the kind to compile for, such as cpu or cuda.",
)
@operator_options
@json_option
def command(bundle_path: str, out: str, device: str, allow_ops: tuple[str, ...], as_json: bool) -> None:
    """Compile a bundle to native code.

    A compilation unit is a region that the stages call several times, or a whole stage. Each distinct unit is compiled once with
    AOTInductor. The code is for inference, with the installed version of torch, on this kind of processor. It is written to a folder
    outside of the bundle, which 'stagepack load --compiled' and 'stagepack serve --compiled' take.
    """
    bundle = open_argument(bundle_path)
    check_output_folder(out)
    start_time = time.perf_counter()
    with progress("importing torch") as next_step, orderly_termination():
        from stagepack_loaders.torch.compilation import compile_ahead  # noqa: PLC0415 - torch, after the arguments are checked

        units = compile_ahead(bundle, out, device, allow_ops=allow_ops, progress=next_step)
    seconds = round(time.perf_counter() - start_time, 3)
    facts: list[dict[str, Any]] = []
    for unit in units:
        stage_number, region_name = unit.locations[0]
        facts.append(
            {
                "part": f"{region_name or 'all'} of stage {stage_number}",
                "more": len(unit.locations) - 1,
                "file": unit.file_name or None,
                "reason": unit.reason or None,
            }
        )
    if as_json:
        print_json({"bundle": bundle_path, "out": out, "parts": facts, "seconds": seconds})
        return
    rows = [
        [unit_facts["part"], str(unit_facts["more"]), unit_facts["file"] or f"not compiled: {unit_facts['reason']}"]
        for unit_facts in facts
    ]
    print_table("compilation units", ["unit", "#other uses", "file"], rows)
    compiled_count = sum(unit_facts["file"] is not None for unit_facts in facts)
    print_line(f"wrote {out}: {compiled_count} of {len(facts)} units, in {seconds:.1f} s")
