"""What Python adds to a compile, and need not: memory for frames at each call, and looks at what no compile has made.

**Frames.** Python (3.11 and later) keeps frames in chunks of 16 kB. It maps a chunk where a call needs one, and unmaps
it at the return::

    chunk 0  ▐ main ▐ … ▐ backend ▐ pass ▐ loop ▐        the loop's frame is the last that has room
    chunk 1                                      ▐ f ▐    each f() of the loop: mmap, page fault, munmap

A compile is a deep stack with short calls at its top. Whether its hot loops stand at a chunk's end is luck. Where they
do, a third of the time went there. A frame larger than all others gets a larger chunk, with as much room after it.

**Collections.** A compile makes many objects in cycles, so Python looks for garbage, and each full collection looks at
all objects of the process: PyTorch, the model, its data. Those that were there before are left out while it lasts.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

SLOTS = 100_000
"""Of the large frame: 0.8 MB, so that its chunk has 1 MB. Of these, only pages that a frame touches take memory."""


def lean(f: Callable[P, R]) -> Callable[P, R]:
    """Decorate what compiles: its calls find room for their frames, and collections leave out what was there before."""

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _only_new_garbage():
            return _with_room(lambda: f(*args, **kwargs))

    return run


def _call(f: Callable[[], R]) -> R:
    return f()


_with_room = FunctionType(_call.__code__.replace(co_stacksize=SLOTS), _call.__globals__, "_with_room")


_ours = False  # frozen by a compile that goes on
_programs = False  # frozen by the program: seen once, it is not looked for again, since a look goes through them all


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Collections inside look at what is made inside. Where the program itself has frozen objects, nothing changes."""
    global _ours, _programs
    if _ours or _programs or gc.get_freeze_count():
        _programs = not _ours
        yield
        return
    _ours = True
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _ours = False
