"""Processes that are ranks. They start once for all cases of a kind, and once more behind a case that ended them."""

from __future__ import annotations

import datetime
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.lines import Line, Setting, failed

SECONDS = 60
"""How long a rank waits in a collective."""

Case = tuple[Any, ...]


def on_ranks(
    setting: Setting,
    function: Callable[..., Any],
    cases: dict[str, Case],
    read: Callable[[str, list[Any]], Line | list[Line]],
    *,
    shared: int = 0,
) -> Iterator[Line]:
    """``function(device, *case)`` on every rank, case by case, and the lines that ``read(name, results)`` makes of it.

    A case that raises, or ends its rank, is a line; the next goes on.

    Args:
        function: a top-level one.
        cases: by the name that the line of one that fails has.
        read: is given the results by rank.
        shared: so many ranks, all on one device, over gloo, as tests/nccl/stand_in.py has it.
    """
    left = list(cases.items())
    while left:
        done = 0
        for results in _answers(setting, function, [case for _, case in left], shared):
            yield from _read(left[done][0], results, read)
            done += 1
        left = left[done:]


def _read(name: str, results: Any, read: Callable[[str, list[Any]], Line | list[Line]]) -> Iterator[Line]:
    try:
        if isinstance(results, Exception):
            raise results
        lines = read(name, results)
    except Exception as error:
        yield failed(name, "", error)
        return
    yield from lines if isinstance(lines, list) else [lines]


def _answers(
    setting: Setting, function: Callable[..., Any], cases: list[Case], shared: int
) -> Iterator[list[Any] | Exception]:
    """Of each case what the ranks answer; ends behind one that has ended a rank."""
    world = shared or setting.ranks
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task").write_bytes(pickle.dumps((function, cases)))
        context = torch.multiprocessing.spawn(_rank, (setting, world, shared > 0, name), nprocs=world, join=False)
        ended: Exception | None = None
        for i in range(len(cases)):
            paths = [folder / f"{i}-{rank}" for rank in range(world)]
            while ended is None and not all(path.exists() for path in paths):
                ended = _ended(context)
                time.sleep(0.05)
            if not all(path.exists() for path in paths):
                assert ended is not None
                yield ended
                return
            answers = [pickle.loads(path.read_bytes()) for path in paths]
            errors = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
            yield RuntimeError(errors[0]) if errors else [result for _, result in answers]
        if ended is None:
            context.join()


def _ended(context: Any) -> Exception | None:
    """How the ranks have ended, if they have; where one raised or died, the others are ended."""
    try:
        return RuntimeError("the ranks have ended without an answer") if context.join(timeout=0.2) else None
    except Exception as error:
        return error


def _rank(rank: int, setting: Setting, world: int, shared: bool, name: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.backends.cudnn.allow_tf32 = False  # numbers are compared
    device = torch.device("cpu")
    if setting.device == "cuda":
        device = torch.device("cuda", 0 if shared else rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend, folder = setting.backend, Path(name)
    if shared:
        from tests.nccl.stand_in import NAME  # it registers the backend

        backend = NAME
    timeout = datetime.timedelta(seconds=SECONDS)
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=timeout)
    function, cases = pickle.loads((folder / "task").read_bytes())
    for i, case in enumerate(cases):
        torch._dynamo.reset()
        try:
            answer: tuple[str, Any] = "", function(device, *case)
        except Exception:
            answer = traceback.format_exc(), None
        (folder / f"part{rank}").write_bytes(pickle.dumps(answer))
        (folder / f"part{rank}").rename(folder / f"{i}-{rank}")  # whole, or not there
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of a process group may keep an interpreter from ending
