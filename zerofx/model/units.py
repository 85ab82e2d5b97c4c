"""Bytes and seconds, as people read them."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """``seconds`` in the largest of s, ms and µs that leaves a number of at least 1."""
    for unit, factor in (("s", 1), ("ms", 1e3)):
        if abs(seconds) * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.1f} µs" if seconds else "0 s"


def format_bytes(n: float) -> str:
    """``n`` bytes in the largest unit that leaves a number of at least 1 (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.1f} {unit}" if unit != "B" else f"{n:.0f} B"
        n /= 1000
    return f"{n:.1f} TB"
