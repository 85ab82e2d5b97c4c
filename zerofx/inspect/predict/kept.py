"""Rates of this machine that were kept: a file for each kind of device and number of ranks.

::

    ~/.cache/zerofx/rates-cpu-8.json         XDG_CACHE_HOME in the place of ~/.cache, where it is set
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from zerofx.simulate.clock import Rates


def path_of(device: str, ranks: int) -> Path:
    """Where the rates of so many ``ranks`` with this kind of device are."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "zerofx" / f"rates-{device}-{ranks}.json"


def keep_rates(rates: Rates, device: str, ranks: int) -> Path:
    """Write them; several ranks of a host may, for all have the same."""
    path = path_of(device, ranks)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(asdict(rates), indent=1) + "\n")
    part.rename(path)
    return path


def kept_rates(device: str, ranks: int) -> Rates | None:
    """Those that were kept; None: there are none.

    Raises:
        ValueError: the file has no rates in it.
    """
    path = path_of(device, ranks)
    if not path.is_file():
        return None
    try:
        return Rates(**json.loads(path.read_text()))
    except (ValueError, TypeError) as e:
        raise ValueError(f"{path}: not what zerofx.calibrate(keep=True) writes: {e}. Remove it.") from e
