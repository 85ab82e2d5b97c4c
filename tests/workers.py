"""Real gloo ranks for tests: processes that start once per session and run one function after another.

    def work(scale):                       # a top-level function: it is sent by name
        t = torch.ones(1) * scale
        dist.all_reduce(t)
        return t.item()

    def test_work(workers2):
        assert workers2.run(work, 3.0) == [6.0, 6.0]

Importing torch, Dynamo and Inductor takes seconds: ranks are forked from a process that has done so (tests/preload.py),
which costs milliseconds. The processes stay, since they warm up, and groups of all sizes share them. A process joins
another group where the next run wants another size::

    process     0   1   2   3
    workers2    0   1               a rank has the number of its process;
    workers3    0   1   2           processes beyond the group wait

What distributed tests get wrong when they fail is the waiting: one rank raises, the others sit in a collective for
half an hour. Here every run has a time limit; every rank's traceback, or the stack on which it hangs, or the signal
that killed it, is in the error; and after a failure all processes are killed (only our own) and started afresh by the
next run. So they are after a test of failures, one whose group zerofx's watchdog has ended: nothing can be sent there.
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
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist

# A test looks at what is compiled now, not at what the last run left in a cache: tests/test_warm.py turns that on.
torch._functorch.config.enable_autograd_cache = False

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 3.0  # what a deadline is multiplied by: it is there to end a hang, and machines differ by as much
START_SECONDS = 120.0 * PATIENCE
GRACE_SECONDS = 1.5  # how long the other ranks get to finish once one has failed
_DUMP_SIGNAL = signal.SIGUSR1


class Workers:
    """A gloo group of `world_size` ranks, in the first of `processes`; joined by the first :meth:`run`."""

    def __init__(self, world_size: int, processes: Processes | None = None) -> None:
        self.world_size = world_size
        self._processes = processes or Processes()

    def __repr__(self) -> str:
        return f"Workers({self.world_size}, {'running' if self.pids else 'stopped'})"

    @property
    def pids(self) -> list[int]:
        return self._processes.pids[: self.world_size]

    def run(self, fn: Callable[..., Any] | str, *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
        """Calls ``fn(*args, **kwargs)`` on every rank and returns the results by rank.

        `fn` is a top-level function or "module:qualname". Arguments and results are pickled, so tensors are
        copies. An error raises AssertionError here; what ranks are meant to raise they catch themselves.
        `timeout`: seconds that an ordinary machine needs at most; a slow one gets `PATIENCE` times as many.
        """
        call = pickle.dumps((fn, args, kwargs))
        name = fn if isinstance(fn, str) else fn.__qualname__
        return self._processes.call(self.world_size, call, name, timeout * PATIENCE)


class Processes:
    """What ranks live in: as many as the largest group so far has, in one group at a time.

    ``variables``: of their environment, for what is decided as modules are imported. Processes then begin empty.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._variables = variables
        self._all: list[_Rank] = []
        self._joined = 0  # how many of them are in a group now
        self._groups = 0
        self._store: dist.TCPStore | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid or 0 for rank in self._all]

    def call(self, world_size: int, call: bytes, name: str, timeout: float) -> list[Any]:
        """The results of a pickled call on a group of `world_size`, by rank."""
        try:
            self._start(world_size)
            if self._joined != world_size:
                self._groups += 1
                join = pickle.dumps((_join, (world_size, f"group{self._groups}"), {}))
                self._ask(self._all[:world_size], join, "joining", START_SECONDS)
                self._joined = world_size
            results = self._ask(self._all[:world_size], call, name, timeout)
            if any(rank.spent for rank in self._all[:world_size]):
                self.stop()
            return results
        except BaseException:  # ctrl-c as well: an answer that nobody fetched would be taken for the next one
            self.stop()
            raise

    def _start(self, world_size: int) -> None:
        """Starts the processes that are missing."""
        if world_size <= len(self._all):
            return
        if self._store is None or self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="zerofx-workers-")
            # The store lives here, on a port the system chose: no two sessions can collide.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port, folder = self._store.port, Path(self._folder.name)
        start = forks() if self._variables is None else multiprocessing.get_context("spawn")
        with _environment(self._variables or {}):
            new = [_Rank(rank, port, folder / f"rank{rank}", start) for rank in range(len(self._all), world_size)]
        self._all += new
        _collect(new, "starting", START_SECONDS)

    def _ask(self, ranks: list[_Rank], call: bytes, name: str, timeout: float) -> list[Any]:
        for rank in ranks:
            rank.send(call)
        _collect(ranks, name, timeout)
        return [rank.result for rank in ranks]

    def stop(self) -> None:
        """Ends the processes: politely where they listen, by SIGKILL where they do not."""
        for rank in self._all:
            rank.connection.close()  # an idle rank reads the end of the pipe and leaves
        deadline = time.monotonic() + (0 if any(rank.error for rank in self._all) else 5)
        for rank in self._all:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
            rank.process.close()
        self._all = []
        self._joined = 0
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _collect(ranks: list[_Rank], what: str, timeout: float) -> None:
    """Waits for one answer of every rank; raises if one fails or is late."""
    deadline = time.monotonic() + timeout
    waiting = list(ranks)
    while waiting and (left := deadline - time.monotonic()) > 0:
        ready = wait([rank.connection for rank in waiting], left)
        done = [rank for rank in waiting if rank.connection in ready]
        for rank in done:
            rank.receive()
        if any(rank.error for rank in done):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        waiting = [rank for rank in waiting if rank not in done]
    if not waiting and not any(rank.error for rank in ranks):
        return
    late = "still waiting" if any(rank.error for rank in ranks) else f"no answer after {timeout:g} s"
    for rank in waiting:
        rank.error = late
        rank.ask_for_stacks()
    patience = time.monotonic() + 5  # the signal handler writes at once, when its process gets to run
    while any(not rank.stacks() and rank.process.is_alive() for rank in waiting):
        if time.monotonic() > patience:
            break
        time.sleep(0.05)
    time.sleep(0.1 if waiting else 0)
    parts = [f"{what} failed on {len(ranks)} ranks"]
    for rank in ranks:
        parts.append(f"--- rank {rank.rank}: {rank.error.rstrip() or 'finished'}")
        if rank.error and (stacks := rank.stacks()):
            parts.append(f"stacks of rank {rank.rank}:\n{stacks}")
    raise AssertionError("\n".join(parts))


class _Rank:
    """The parent's end of one worker process."""

    def __init__(self, rank: int, port: int, dump: Path, context: Any) -> None:
        self.rank = rank
        self.result: Any = None
        self.error = ""
        self.spent = False
        self._dump = dump
        self.connection, other = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(rank, port, str(dump), other), name=f"rank{rank}", daemon=True
        )
        self.process.start()
        other.close()  # so that the death of the child reads as the end of the pipe

    def send(self, call: bytes) -> None:
        self.result, self.error = None, ""
        with contextlib.suppress(BrokenPipeError):  # it has died: receive() says how
            self.connection.send_bytes(call)

    def receive(self) -> None:
        try:
            self.result, self.error, self.spent = pickle.loads(self.connection.recv_bytes())
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


def forks() -> Any:
    """The multiprocessing context whose processes are forked from one that has imported all that ranks need.

    That process has threads only once torch computes something, which it never does: so forking it is safe.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    with _environment():
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _environment(more: Mapping[str, str] = {}) -> Iterator[None]:
    """What processes of ranks find in their environment."""
    values = {
        "OMP_NUM_THREADS": "1",  # OpenMP reads it as torch is imported
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compiler processes beside each rank
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **more,
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


def _serve(rank: int, port: int, dump: str, connection: Connection) -> None:
    """A process's life: call what comes through the pipe until the pipe ends."""
    file = open(dump, "w")  # noqa: SIM115 - faulthandler keeps the descriptor
    faulthandler.enable(file)
    faulthandler.register(_DUMP_SIGNAL, file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles ctrl-c and ends us
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    connection.send_bytes(pickle.dumps((None, "", False)))  # ready
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, ConnectionError):
            break
        connection.send_bytes(_answer(call))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    os._exit(0)  # threads that a test left behind must not keep the process


def _join(world_size: int, name: str) -> None:
    """Leave the process group, if in one, and join another."""
    if dist.is_initialized():
        dist.destroy_process_group()
        _forget_meshes()
    os.environ["WORLD_SIZE"] = str(world_size)
    server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(name, server),
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        timeout=datetime.timedelta(minutes=30),  # the parent keeps the time
    )


def _forget_meshes() -> None:
    """DTensor remembers what an operator makes of a mesh: later, an equal one would get the groups that are gone."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _answer(call: bytes) -> bytes:
    _reset()
    try:
        fn, args, kwargs = pickle.loads(call)
        return pickle.dumps((_resolve(fn)(*args, **kwargs), "", _spent()))
    except BaseException as error:  # SystemExit and pytest's outcomes as well
        return pickle.dumps((None, _describe(error), True))


def _spent() -> bool:
    """Whether a watchdog has ended a process group of this rank: the next collective there would fail."""
    watch = sys.modules.get("zerofx.runtime.ranks.watch")
    return watch is not None and any(one.failure for one in watch._watches.values())


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
        # Dynamo times each set of guards with the processor's caches emptied: a fifth of what small models take.
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    gc.collect()
    gc.freeze()  # what survives, hundreds of thousands of objects of imported modules, is not gone through again
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
