"""Quantities as the command prints them: bytes, floating-point operations, times."""

from stagepack.format.byte_sizes import format_bytes as format_bytes


def format_flops(flop_count: int) -> str:
    """Return a number of floating-point operations for people: ``1.2 GFLOP``."""
    size = float(flop_count)
    for prefix in ("", "k", "M", "G", "T"):
        if size < 1000:
            return f"{size:.1f} {prefix}FLOP" if prefix else f"{size:.0f} FLOP"
        size /= 1000
    return f"{size:.1f} PFLOP"


def format_time(picoseconds: float) -> str:
    """Return a time for people: ``1.2 ms``."""
    time = float(picoseconds)
    for unit in ("ps", "ns", "µs", "ms"):
        if time < 1000:
            return f"{time:.0f} ps" if unit == "ps" else f"{time:.1f} {unit}"
        time /= 1000
    return f"{time:.1f} s"
