"""Quantities as people write and read them."""

import re

from stagepack.errors import CutError

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


def parse_byte_size(text: int | str) -> int:
    """A number of bytes: ``24GiB`` (1024 ** 3), ``24GB`` (1000 ** 3), ``500 MB``, or a plain number.

    Raises:
        CutError: it is not a number of bytes.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KkMGT]?i?B?)", str(text))
    unit = found[2].replace("k", "K") if found else "?"
    if found is None or unit not in _UNITS:
        raise CutError(f"expected a number of bytes such as 24GiB, 24GB or 25769803776, found {text!r}")
    count = int(float(found[1]) * _UNITS[unit]) if "." in found[1] else int(found[1]) * _UNITS[unit]
    if count >= 2**63:
        raise CutError(f"expected fewer than 2 ** 63 bytes, found {text!r}")
    return count


def format_bytes(count: int) -> str:
    """A number of bytes for people: ``90.3 MB``."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def format_flops(count: int) -> str:
    """A number of floating-point operations for people: ``1.2 GFLOP``."""
    size = float(count)
    for unit in ("", "k", "M", "G", "T"):
        if size < 1000:
            return f"{size:.1f} {unit}FLOP"
        size /= 1000
    return f"{size:.1f} PFLOP"


def format_time(picoseconds: float) -> str:
    """A time for people: ``1.2 ms``."""
    time = float(picoseconds)
    for unit in ("ps", "ns", "µs", "ms"):
        if time < 1000:
            return f"{time:.0f} ps" if unit == "ps" else f"{time:.1f} {unit}"
        time /= 1000
    return f"{time:.1f} s"
