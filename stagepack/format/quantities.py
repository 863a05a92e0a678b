"""Quantities as users write and read them: numbers of bytes, operations and times."""

import re
from collections.abc import Sequence

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parse_byte_size(size: int | str) -> int:
    """Parse a number of bytes below 2 ** 63: ``24GiB`` (1024 ** 3), ``24GB`` (1000 ** 3), ``500 MB``, or a plain number; rounded down."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KkMGT]?i?B?)", str(size))
    unit = match[2].replace("k", "K") if match else "?"
    if match is None or unit not in _UNITS:
        raise ValueError(f"expected a number of bytes such as 24GiB, 24GB or 25769803776, found {size!r}")
    scale = _UNITS[unit]
    byte_count = float(match[1]) * scale if "." in match[1] else int(match[1]) * scale
    if byte_count >= 2**63:
        raise ValueError(f"expected fewer than 2 ** 63 bytes, found {size!r}")
    return int(byte_count)


def parse_seconds(text: str) -> float:
    """Parse a time with its unit: ``0.1ms``, ``5 us``, ``2s``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|ms|us|µs|ns)", text)
    if match is None:
        raise ValueError(f"expected a time such as 0.1ms, 5us or 2s, found {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def format_bytes(byte_count: int) -> str:
    """Return a number of bytes for people: ``90.3 MB``."""
    return format_quantity(byte_count, ("B", "kB", "MB", "GB", "TB"))


def format_flops(flop_count: int) -> str:
    """Return a number of floating-point operations for people: ``1.2 GFLOP``."""
    return format_quantity(flop_count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def format_time(picoseconds: float) -> str:
    """Return a time for people: ``1.2 ms``."""
    return format_quantity(picoseconds, ("ps", "ns", "µs", "ms", "s"))


def format_quantity(amount: float, units: Sequence[str]) -> str:
    """Return an amount of the first unit in the largest of the units of which there is one; each is 1,000 of the one before."""
    position = 0
    while amount >= 1000 and position < len(units) - 1:
        amount, position = amount / 1000, position + 1
    return f"{amount:.{1 if position else 0}f} {units[position]}"
