"""`stagepack onnx`."""

import time
from typing import Any

import click

from stagepack.cli.bundle_facts import onnx_bytes
from stagepack.cli.output import finite, import_modules, print_json, print_line, print_table, progress, reports_errors
from stagepack.cli.quantities import format_bytes
from stagepack.cli.run_options import operator_options
from stagepack.format.reader import Bundle


@click.command("onnx")
@click.argument("bundle", type=click.Path())
@operator_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def command(bundle: str, allow_ops: tuple[str, ...], imports: tuple[str, ...], as_json: bool) -> None:
    """Add an ONNX file to each stage of BUNDLE; its weights stay in the weight files that are there.

    Each stage then answers the example in ONNX Runtime. One that has no ONNX form, or answers otherwise than in torch, runs in torch only.
    """
    opened = Bundle(bundle)
    import_modules(imports)
    started = time.perf_counter()
    with progress("import torch") as say:
        from stagepack.onnx import add_onnx  # noqa: PLC0415 - torch, after the arguments are checked

        added = add_onnx(opened, allow_ops=allow_ops, progress=say)
    facts = onnx_facts(added)
    if as_json:
        print_json({"bundle": bundle, "stages": facts, "seconds": round(time.perf_counter() - started, 3)})
    else:
        print_onnx(facts)
        print_line(f"wrote {bundle}, in {time.perf_counter() - started:.1f} s")


def onnx_facts(added: Any) -> list[dict[str, Any]]:
    """What became of each stage, as plain data."""
    facts = []
    for number, stage in enumerate(added.bundle.stages):
        checked, found = added.checked.get(number), onnx_bytes(added.bundle, stage) or {}
        facts.append(
            {
                "stage": number,
                "bytes": found.get("bytes"),
                "own_bytes": found.get("own_bytes"),
                "difference": None if checked is None or checked.difference is None else finite(checked.difference),
                "not_compared": None if checked is None else checked.reason or None,
                "torch_only": added.torch_only.get(number),
            }
        )
    return facts


def print_onnx(facts: list[dict[str, Any]]) -> None:
    """Print what became of each stage."""
    rows = [
        [
            str(stage["stage"]),
            *("-" if stage[key] is None else format_bytes(stage[key]) for key in ("bytes", "own_bytes")),
            f"torch only: {stage['torch_only']}"
            if stage["torch_only"]
            else f"not compared: {stage['not_compared']}"
            if stage["not_compared"]
            else f"differs from torch by {stage['difference']:g}",
        ]
        for stage in facts
    ]
    print_table("ONNX", ["#stage", "#model", "#weights of its own", "answer to the example"], rows)
