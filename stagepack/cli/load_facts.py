"""What `stagepack load` prints."""

from pathlib import Path
from typing import Any

from stagepack.cli.output import count_of, print_line, print_table
from stagepack.cli.quantities import format_bytes
from stagepack.cli.trace_option import print_trace
from stagepack_loaders.window_plan import Residency

_VERIFIED_PARTS = {
    "full": "all files that were read",
    "manifest": "all but the content of weight files (--verify manifest)",
    "off": "the manifest only (--verify off)",
}


def print_facts(facts: dict[str, Any], inputs_file: Path | None, outputs_file: Path | None) -> None:
    """Print what was loaded, and what it answered.

    inputs_file: the file of the inputs that were run; None for the example.
    """
    in_processes = any("process" in stage for stage in facts["stages"])
    rows = [
        [
            str(stage["stage"]),
            *([f"{stage['process']} on {stage['host']}"] if in_processes else []),
            stage["runtime"],
            stage["device"],
            format_bytes(stage["bytes_read"]),
            f"{stage['seconds']:.3f} s",
            " ".join(stage["files"]),
        ]
        for stage in facts["stages"]
    ]
    columns = ["#stage", *(["process"] if in_processes else []), "runtime", "device", "#read", "#time", "files"]
    print_table("loaded stages", columns, rows)
    print_line(f"verified: {_verified_text(facts)}")
    for stage in facts["stages"]:
        if "residency" in stage:
            print_line(f"stage {stage['stage']}: {Residency(**stage['residency'])}")
    outputs = count_of("output", facts.get("outputs", 0))
    if "difference" in facts:
        print_line(f"ran the example: {outputs}, largest difference {facts['difference']:g}")
    elif inputs_file is not None:
        print_line(f"ran {inputs_file}: {outputs}")
    phases: dict[str, float] = facts["start"]
    goal = "first answer" if "first call" in phases else "loaded"
    durations = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in phases.items())
    print_line(f"{goal} after {sum(phases.values()):.3f} s: {durations}")
    if "all_weights" in facts:
        print_line(f"all weights after {facts['all_weights']:.3f} s")
    if outputs_file:
        print_line(f"wrote {outputs_file}")
    if "trace" in facts:
        print_trace(facts["trace"])


def _verified_text(facts: dict[str, Any]) -> str:
    """Say what was compared with its digest, and when."""
    unchanged_bytes = sum(stage.get("bytes_unchanged", 0) for stage in facts["stages"])
    earlier = (
        f"; {format_bytes(unchanged_bytes)} of weights earlier, and they are unchanged since" if unchanged_bytes else ""
    )
    return _VERIFIED_PARTS[facts["verify"]] + earlier
