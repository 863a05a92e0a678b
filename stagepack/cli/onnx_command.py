"""`stagepack onnx`."""

import time
from typing import TYPE_CHECKING, Any

from stagepack.cli.bundle_facts import each_entry_point, onnx_facts
from stagepack.cli.command import option_object, subcommand
from stagepack.cli.failures import fail, shown_warnings
from stagepack.cli.output import finite, print_json, print_line, print_table, progress
from stagepack.cli.shared_flags import ALLOW_OPS, ATOL, IMPORTS, JSON, RTOL, BundleOptions, open_argument, refuse_url
from stagepack.cli.termination import orderly_termination
from stagepack.extras import require_extras
from stagepack.format.quantities import format_bytes
from stagepack.format.reader import Bundle

if TYPE_CHECKING:
    from stagepack.roads.onnx import AddedOnnx


@option_object
class _Options(BundleOptions):
    rtol: float | None = RTOL
    atol: float | None = ATOL
    allow_ops: tuple[str, ...] = ALLOW_OPS
    imports: tuple[str, ...] = IMPORTS
    as_json: bool = JSON


@subcommand("onnx", examples=["stagepack onnx net.stagepack"])
def command(options: _Options) -> None:
    """Add ONNX files to a bundle.

    Each stage gets an ONNX model whose initializers point into the weight files of the bundle, so weights are not copied. The model of
    each stage is then run in ONNX Runtime on the example, and at other sizes that the bundle allows. A stage that cannot be converted,
    that ONNX Runtime cannot run on the CPU, or whose answer differs from that in torch by more than rounding, gets no ONNX model and
    runs in torch only. The exit status is 1 if no stage has one.

    A difference is allowed within a tolerance of the dtype: for float32, 1e-3 of each value plus 1e-4. Beyond it, the stage is computed
    in float64, and a difference of up to 8 times the difference between torch and float64 is allowed. --rtol and --atol replace both.
    """
    refuse_url(options.bundle_path, "ONNX files are written into the bundle")
    require_extras("torch", "onnx", "onnxruntime")
    bundle = open_argument(options.bundle_path)
    start_time = time.perf_counter()
    with progress("importing torch") as next_step, orderly_termination(), shown_warnings():
        from stagepack.roads.onnx import add_onnx  # noqa: PLC0415 - torch, after the arguments are checked

        stages = []
        for selected in each_entry_point(bundle):
            # Each conversion writes the bundle again.
            current = Bundle(bundle.path).select(selected.entry_point.name)
            conversion = add_onnx(
                current, allow_ops=options.allow_ops, rtol=options.rtol, atol=options.atol, progress=next_step
            )
            stages += conversion_facts(conversion)
    seconds = time.perf_counter() - start_time
    if options.as_json:
        print_json({"bundle": options.bundle_path, "stages": stages, "seconds": round(seconds, 3)})
    else:
        print_conversion(stages)
        print_line(f"wrote {options.bundle_path} in {seconds:.1f} s")
    if all(stage["torch_only"] for stage in stages):
        edges = (edge for entry_point in bundle.entry_points for edge in entry_point.edges)
        has_bfloat16 = any(edge.dtype == "bfloat16" for edge in edges)
        cure = ": export the model with --dtype float32 or float16" if has_bfloat16 else ""
        fail(f"{options.bundle_path}: no stage has an ONNX model that ONNX Runtime can run{cure}")


def conversion_facts(conversion: "AddedOnnx") -> list[dict[str, Any]]:
    """Return the result of the conversion of each stage as plain data."""
    facts = []
    for stage_number, stage in enumerate(conversion.bundle.stages):
        checked = conversion.checked.get(stage_number)
        sizes = onnx_facts(conversion.bundle, stage) or {}
        facts.append(
            {
                "entry_point": conversion.bundle.entry_point.name,
                "stage": stage_number,
                "bytes": sizes.get("bytes"),
                "own_bytes": sizes.get("own_bytes"),
                "difference": None if checked is None or checked.difference is None else finite(checked.difference),
                "rounding": None if checked is None else checked.rounding,
                "not_compared": None if checked is None else checked.reason or None,
                "sizes": [] if checked is None else list(map(dict, checked.sizes)),
                "unchecked_sizes": [] if checked is None else list(map(dict, checked.unchecked)),
                "torch_only": conversion.torch_only.get(stage_number),
            }
        )
    return facts


def print_conversion(facts: list[dict[str, Any]]) -> None:
    """Print the result of the conversion of each stage."""
    entry_points = {stage["entry_point"] for stage in facts}
    rows = [
        [
            *([stage["entry_point"]] if len(entry_points) > 1 else []),
            str(stage["stage"]),
            *("-" if stage[key] is None else format_bytes(stage[key]) for key in ("bytes", "own_bytes")),
            _outcome(stage),
        ]
        for stage in facts
    ]
    columns = ["#stage", "#model", "#own weights", "result"]
    print_table("ONNX models", ["entry point", *columns] if len(entry_points) > 1 else columns, rows)


def _outcome(stage: dict[str, Any]) -> str:
    if stage["torch_only"]:
        return f"torch only: {stage['torch_only']}"
    if stage["not_compared"]:
        is_random = stage["not_compared"] == "draws random numbers"
        return (
            "draws random numbers as torch does" if is_random else f"not compared with torch: {stage['not_compared']}"
        )
    outcome = f"largest difference from torch {stage['difference']:g}"
    if stage["rounding"] is not None:
        outcome = f"{outcome}; that of torch from float64 is {stage['rounding']:g}"
    if stage["unchecked_sizes"]:
        sizes = "; ".join(
            ", ".join(f"{symbol_name} = {size}" for symbol_name, size in sizes.items())
            for sizes in stage["unchecked_sizes"]
        )
        outcome = f"{outcome}; not checked, as the model fails in torch on inputs made of the example: {sizes}"
    return outcome
