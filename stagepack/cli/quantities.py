"""Quantities as the command prints them: bytes, floating-point operations, times."""

from stagepack.format.dtypes import format_bytes as format_bytes
from stagepack.format.dtypes import format_quantity


def format_flops(flop_count: int) -> str:
    """Return a number of floating-point operations for people: ``1.2 GFLOP``."""
    return format_quantity(flop_count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def format_time(picoseconds: float) -> str:
    """Return a time for people: ``1.2 ms``."""
    return format_quantity(picoseconds, ("ps", "ns", "µs", "ms", "s"))
