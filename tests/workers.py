"""Pools of real gloo ranks for tests: processes that start once and run one function after another.

    def work(scale):                       # a top-level function: it is sent by name
        t = torch.ones(1) * scale
        dist.all_reduce(t)
        return t.item()

    def test_work(workers2):
        assert workers2.run(work, 3.0) == [6.0, 6.0]

Starting a rank costs seconds (importing torch), so the ranks stay. What distributed tests get wrong when they
fail is the waiting: one rank raises, the others sit in a collective for half an hour. Here every run has a
time limit; every rank's traceback, or the stack on which it hangs, or the signal that killed it, is in the
error; and the pool that failed is killed (only its own processes) and started afresh by the next run.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

START_SECONDS = 120.0
GRACE_SECONDS = 1.5  # how long the other ranks get to finish once one has failed
_DUMP_SIGNAL = signal.SIGUSR1


class Workers:
    """`world_size` processes joined in one gloo process group; started by the first :meth:`run`."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[_Rank] = []
        self._store: dist.TCPStore | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __repr__(self) -> str:
        return f"Workers({self.world_size}, {'running' if self._ranks else 'stopped'})"

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid or 0 for rank in self._ranks]

    def run(self, fn: Callable[..., Any] | str, *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
        """Calls ``fn(*args, **kwargs)`` on every rank and returns the results by rank.

        `fn` is a top-level function or "module:qualname". Arguments and results are pickled, so tensors are
        copies. An error raises AssertionError here; what ranks are meant to raise they catch themselves.
        """
        call = pickle.dumps((fn, args, kwargs))
        try:
            self.start()
            for rank in self._ranks:
                rank.send(call)
            self._collect(fn if isinstance(fn, str) else fn.__qualname__, timeout)
        except BaseException:  # ctrl-c as well: an answer that nobody fetched would be taken for the next one
            self.stop()
            raise
        return [rank.result for rank in self._ranks]

    def start(self) -> None:
        """Starts the ranks unless they run."""
        if self._ranks:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="zerofx-workers-")
        # The store lives here, on a port the system chose: no two pools can collide.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with _environment(self.world_size, self._store.port):
            self._ranks = [
                _Rank(rank, self.world_size, self._store.port, Path(self._folder.name) / f"rank{rank}")
                for rank in range(self.world_size)
            ]
        self._collect("starting", START_SECONDS)

    def stop(self) -> None:
        """Ends the ranks: politely where they listen, by SIGKILL where they do not."""
        for rank in self._ranks:
            rank.connection.close()  # an idle rank reads the end of the pipe and leaves
        deadline = time.monotonic() + (0 if any(rank.error for rank in self._ranks) else 5)
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
            rank.process.close()
        self._ranks = []
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _collect(self, what: str, timeout: float) -> None:
        """Waits for one answer of every rank; raises if one fails or is late."""
        deadline = time.monotonic() + timeout
        waiting = list(self._ranks)
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = wait([rank.connection for rank in waiting], left)
            done = [rank for rank in waiting if rank.connection in ready]
            for rank in done:
                rank.receive()
            if any(rank.error for rank in done):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            waiting = [rank for rank in waiting if rank not in done]
        if not waiting and not any(rank.error for rank in self._ranks):
            return
        late = "still waiting" if any(rank.error for rank in self._ranks) else f"no answer after {timeout:g} s"
        for rank in waiting:
            rank.error = late
            rank.ask_for_stacks()
        patience = time.monotonic() + 5  # the signal handler writes at once, when its process gets to run
        while any(not rank.stacks() and rank.process.is_alive() for rank in waiting):
            if time.monotonic() > patience:
                break
            time.sleep(0.05)
        time.sleep(0.1 if waiting else 0)
        parts = [f"{what} failed on {self.world_size} ranks"]
        for rank in self._ranks:
            parts.append(f"--- rank {rank.rank}: {rank.error.rstrip() or 'finished'}")
            if rank.error and (stacks := rank.stacks()):
                parts.append(f"stacks of rank {rank.rank}:\n{stacks}")
        raise AssertionError("\n".join(parts))


class _Rank:
    """The parent's end of one worker process."""

    def __init__(self, rank: int, world_size: int, port: int, dump: Path) -> None:
        self.rank = rank
        self.result: Any = None
        self.error = ""
        self._dump = dump
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(rank, world_size, port, str(dump), other), name=f"rank{rank}", daemon=True
        )
        self.process.start()
        other.close()  # so that the death of the child reads as the end of the pipe

    def send(self, call: bytes) -> None:
        self.result, self.error = None, ""
        with contextlib.suppress(BrokenPipeError):  # it has died: receive() says how
            self.connection.send_bytes(call)

    def receive(self) -> None:
        try:
            self.result, self.error = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join(5)
            code = self.process.exitcode
            how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            self.error = f"process died: {how}"

    def ask_for_stacks(self) -> None:
        if self.process.pid is not None and self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, _DUMP_SIGNAL)

    def stacks(self) -> str:
        """What faulthandler wrote: on request, or as the process crashed."""
        return self._dump.read_text(errors="replace").rstrip() if self._dump.exists() else ""


@contextlib.contextmanager
def _environment(world_size: int, port: int) -> Iterator[None]:
    """The environment that workers inherit: OpenMP reads its variable as torch is imported."""
    values = {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compiler processes beside each rank
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if sys.platform == "linux":
        values["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that does not resolve would stop gloo
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(rank: int, world_size: int, port: int, dump: str, connection: Connection) -> None:
    """A worker's life: join the group, then call what comes through the pipe until the pipe ends."""
    file = open(dump, "w")  # noqa: SIM115 - faulthandler keeps the descriptor
    faulthandler.enable(file)
    faulthandler.register(_DUMP_SIGNAL, file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles ctrl-c and ends us
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = datetime.timedelta(minutes=30)  # the parent keeps the time
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    connection.send_bytes(pickle.dumps((None, "")))  # ready
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, ConnectionError):
            break
        connection.send_bytes(_answer(call))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    os._exit(0)  # threads that a test left behind must not keep the process


def _answer(call: bytes) -> bytes:
    _reset()
    try:
        fn, args, kwargs = pickle.loads(call)
        return pickle.dumps((_resolve(fn)(*args, **kwargs), ""))
    except BaseException as error:  # SystemExit and pytest's outcomes as well
        return pickle.dumps((None, _describe(error)))


def _resolve(fn: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(fn, str):
        return fn
    module, _, qualname = fn.partition(":")
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _reset() -> None:
    """Every run starts alike: nothing compiled, nothing to collect, the same seeds on all ranks."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    gc.collect()
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _describe(error: BaseException) -> str:
    """The traceback, and the plain values around a failed `assert`, which pytest cannot rewrite here."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, AssertionError) and error.__traceback__ is not None:
        *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
        plain = (bool, int, float, str, list, tuple, dict, torch.dtype)
        values = {name: value for name, value in frame.f_locals.items() if isinstance(value, plain)}
        text += "".join(f"    {name} = {repr(value)[:300]}\n" for name, value in values.items())
    return text


def _leave_with_parent() -> None:
    """Ends this process when the parent is gone, however it went, even while the main thread hangs."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
