"""`stagepack compile`."""

import time
from typing import Any

from stagepack.cli.command import flag, option_object, subcommand
from stagepack.cli.output import print_json, print_line, print_table, progress
from stagepack.cli.shared_flags import (
    ALLOW_OPS,
    IMPORTS,
    JSON,
    OUT_FOLDER,
    BundleOptions,
    check_output_folder,
    open_argument,
)
from stagepack.cli.termination import orderly_termination


@option_object
class _Options(BundleOptions):
    out: str = OUT_FOLDER
    device: str = flag("--device DEVICE", "Device of the kind to compile for, such as cpu or cuda.", default="cpu")
    allow_ops: tuple[str, ...] = ALLOW_OPS
    imports: tuple[str, ...] = IMPORTS
    as_json: bool = JSON


@subcommand(
    "compile",
    examples=[
        "stagepack compile net.stagepack -o net.compiled --device cuda",
        "stagepack load net.stagepack --device cuda --compiled net.compiled",
    ],
)
def command(options: _Options) -> None:
    """Compile a bundle to native code.

    A compilation unit is a region that the stages call several times, or a whole stage. Each distinct unit is compiled once with
    AOTInductor. The code is for inference, with the installed version of torch, on this kind of processor. It is written to a folder
    outside of the bundle, which 'stagepack load --compiled' and 'stagepack serve --compiled' take.
    """
    bundle = open_argument(options.bundle_path)
    check_output_folder(options.out)
    start_time = time.perf_counter()
    with progress("importing torch") as next_step, orderly_termination():
        from stagepack_loaders.torch.compilation import compile_ahead  # noqa: PLC0415 - torch, after the arguments are checked

        units = compile_ahead(bundle, options.out, options.device, allow_ops=options.allow_ops, progress=next_step)
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
    if options.as_json:
        print_json({"bundle": options.bundle_path, "out": options.out, "parts": facts, "seconds": seconds})
        return
    rows = [
        [unit_facts["part"], str(unit_facts["more"]), unit_facts["file"] or f"not compiled: {unit_facts['reason']}"]
        for unit_facts in facts
    ]
    print_table("compilation units", ["unit", "#other uses", "file"], rows)
    compiled_count = sum(unit_facts["file"] is not None for unit_facts in facts)
    print_line(f"wrote {options.out}: {compiled_count} of {len(facts)} units, in {seconds:.1f} s")
