"""All looks and all trials, a line each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from zerofx.inspect.doctor import looks
from zerofx.inspect.doctor.looks import Finding
from zerofx.inspect.doctor.trials import Trial, folder, trials

SECONDS = 50.0
"""After so many trials are stopped."""


def examine(seconds: float = SECONDS) -> Iterator[Finding]:
    """What this machine has and whether it works, as it is found. What goes wrong is a finding; nothing is raised.

    Args:
        seconds: after which trials are stopped; they are lines that fail then.
    """
    deadline = time.monotonic() + seconds
    with folder() as name:
        under_way: list[Trial] = []
        try:
            for trial in trials(Path(name)):
                under_way.append(trial)
                trial.start()
            for look in looks.LOOKS:
                yield _sure(look.__name__, look)
            for trial in under_way:
                yield _sure(trial.name, lambda trial=trial: trial.finish(deadline))  # type: ignore[misc]
        finally:
            for trial in under_way:
                trial.stop()


def _sure(name: str, find: Callable[[], Finding]) -> Finding:
    try:
        return find()
    except Exception as e:
        return Finding(name, "FAILS", f"could not be looked at: {type(e).__name__}: {e}", "please report this")


def doctor(seconds: float = SECONDS) -> int:
    """Print `examine`; returns the exit status, 1 where something fails."""
    failed = 0
    for finding in examine(seconds):
        print(finding, flush=True)
        failed += finding.state == "FAILS"
    print("all is well" if not failed else f"{failed} of these fail; what to do is below each")
    return int(failed > 0)
