"""Scripts as users write them, run by ranks of `tests/workers.py` as torchrun would run them.

``scripts/`` has one for each package, with plain data parallelism. `converted` changes lines of one, as many as the
documentation says, and `run_script` runs it: the variable ``result`` is what comes back.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

SCRIPTS = Path(__file__).parent / "scripts"


def plain(name: str) -> str:
    """The text of a script."""
    return (SCRIPTS / f"{name}.py").read_text()


def converted(name: str, changes: Mapping[str, str]) -> str:
    """The text of a script with whole lines changed, each of which is in it once."""
    lines = plain(name).splitlines()
    for old, new in changes.items():
        (at,) = [i for i, line in enumerate(lines) if line.strip() == old]
        lines[at] = lines[at].replace(old, new)
    return "\n".join(lines)


def run_script(text: str, *argv: str) -> Any:
    """Run a script's text on this rank, and return its ``result``."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with as_torchrun_would(), mock.patch.object(sys, "argv", ["script.py", *argv]):
        exec(compile(text, "script.py", "exec"), namespace)
    dist.barrier()
    return namespace["result"]


@contextlib.contextmanager
def as_torchrun_would() -> Iterator[None]:
    """The environment of one of torchrun's processes; what packages keep of it is forgotten afterwards."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    found = {
        **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1"},
    }
    before = torch.get_rng_state()
    with mock.patch.dict(os.environ, found), warnings.catch_warnings():
        try:
            yield
        finally:
            forget()
            torch.set_rng_state(before)


def forget() -> None:
    """accelerate's states are kept for the process."""
    if "accelerate" in sys.modules:
        state = importlib.import_module("accelerate.state")
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


def close(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """Numbers in nestings of dictionaries and lists are equal but for the order of sums; all else is equal."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            close(found[name], expected[name], tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), (found, expected)
        for one, other in zip(found, expected, strict=True):
            close(one, other, tolerance)
    elif isinstance(expected, float):
        assert abs(found - expected) <= tolerance * max(1.0, abs(expected)), (found, expected)
    else:
        assert found == expected
