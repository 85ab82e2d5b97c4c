"""Bytes and seconds, as people read and write them."""

from __future__ import annotations

import re

PREFIXES = {"": 1.0} | {p: 1000.0**i for i, p in enumerate("kMGTP", start=1)}
BYTES = (
    {prefix + "B": factor for prefix, factor in PREFIXES.items()}
    | {prefix + "iB": 1024.0**i for i, prefix in enumerate("kMGT", start=1)}
    | {"": 1.0}
)
"""Unit -> bytes: decimal units and binary ones."""


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


def parse_bytes(text: str) -> float:
    """``80GB`` and ``80GiB`` as bytes: decimal units and binary ones.

    Raises:
        ValueError: no number of bytes, more than 0.
    """
    return parse_number(text, BYTES, "bytes, such as 80GB or 80GiB")


def parse_number(text: str, units: dict[str, float], expected: str) -> float:
    """A number and one of ``units``, times its factor.

    Raises:
        ValueError: it is no such thing, or not more than 0; the message says what was ``expected``.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-zµ/]*)\s*", text)
    factors = {unit.lower(): factor for unit, factor in units.items()}
    unit = match[2].lower() if match else ""
    if match is None or unit not in factors or not float(match[1]) > 0:
        raise ValueError(f"{text!r}: expected {expected}.")
    return float(match[1]) * factors[unit]
