"""Quantities as Kubernetes writes them."""

_MEBIBYTE = 2**20
_ROUNDED_TO = 64 * _MEBIBYTE


def memory_quantity(byte_count: int) -> str:
    """Return a number of bytes, rounded up to 64 MiB: ``"1088Mi"``."""
    return f"{-(-byte_count // _ROUNDED_TO) * _ROUNDED_TO // _MEBIBYTE}Mi"
