"""Where a thread is: in a collective of the program's own, and at which line of the program.

A watchdog that waits asks this of the other ranks (`zerofx.runtime.ranks.watch`). It looks at the thread's stack, so
the program has to say nothing, and nothing is slower for it.

Frames of a thread that runs end while they are walked: that has crashed the interpreter (Python 3.11, under Dynamo). So
it is walked once it stands still: `standing` says the same twice.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

_TORCH = os.path.dirname(torch.__file__) + os.sep
_ZEROFX = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_LIBRARIES = tuple(path + os.sep for path in {*map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))})
_COLLECTIVES = {name for name in dir(dist) if name.startswith(("all_", "broadcast", "reduce", "gather", "scatter"))}
_COLLECTIVES |= {"barrier", "monitored_barrier", "send", "recv", "send_object_list", "recv_object_list"}


@dataclass(frozen=True)
class Place:
    """Where a thread is.

    Attributes:
        line: the innermost line of the program's own code, in words; "" where there is none.
        collective: the function of ``torch.distributed`` that it waits in; "" where it does not.
        ranks: the ranks that take part in that.
    """

    line: str = ""
    collective: str = ""
    ranks: tuple[int, ...] = ()

    @staticmethod
    def of(thread: int) -> Place:
        """That of the thread with this identifier, which stands still."""
        frame: FrameType | None = sys._current_frames().get(thread)
        line, collective, ranks = "", "", ()  # type: tuple[str, str, tuple[int, ...]]
        while frame is not None and not line:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if file.endswith("distributed_c10d.py") and name in _COLLECTIVES:  # the outermost one
                collective, ranks = name, _ranks_of(frame.f_locals.get("group"))
            elif not file.startswith((_TORCH, _ZEROFX, *_LIBRARIES, "<")):
                line = f"{os.path.basename(file)}, line {frame.f_lineno}, in {name}"
            frame = frame.f_back
        return Place(line, collective, ranks)

    def __str__(self) -> str:
        inside = f"in torch.distributed.{self.collective}" if self.collective else ""
        return ", ".join(part for part in (inside, f"at {self.line}" if self.line else "") if part)


def standing(thread: int) -> tuple[int, int]:
    """The innermost frame of a thread, and the instruction that it is at: other numbers once it has gone on."""
    frame = sys._current_frames().get(thread)
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


def _ranks_of(group: object) -> tuple[int, ...]:
    with contextlib.suppress(RuntimeError, ValueError, KeyError):  # it is gone meanwhile
        return tuple(dist.get_process_group_ranks(group))  # type: ignore[arg-type]
    return ()
