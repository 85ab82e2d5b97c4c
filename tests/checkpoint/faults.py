"""Kills ranks of a training run at random moments, restarts it, and checks that nothing was lost.

    python -m tests.checkpoint.faults --kills 100           # `make faults`

One *life* is a run from start to kill: as many processes as there are ranks, which load the latest checkpoint, train,
and save at every step, in the background at every second one. A kill (SIGKILL) hits one rank or all of them, while
they start, load, train or save. After each:

* a checkpoint is there, whole, and not older than the last one whose save had returned;
* the next life loads it, which checks every checksum;
* every loss, also of steps that were done again, is the one of a run that nobody disturbed: bit for bit at the same
  world size, within ``TOLERANCE`` where world sizes alternate.

Processes are forked from one that has imported everything: a start takes a fraction of a second.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.workers import forks

TOLERANCE = 1e-5  # over all of a run; of one step it is 1e-6
PATIENCE = 30.0  # seconds without a step, or until ranks notice that one is gone: a hang


def live(
    rank: int, size: int, folder: str, rendezvous: str, stage: int, stop: int | None, saves: bool, offload: bool
) -> None:
    """One rank's life."""
    import torch
    import torch.distributed as dist

    import zerofx
    from tests.checkpoint.nets import EACH_GROUP, Net, batch

    faulthandler.register(signal.SIGUSR1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(rendezvous, size), rank=rank, world_size=size)
    scratch = Path(folder) / "scratch" if offload else None
    model = zerofx.shard(Net(), stage=stage, groups=EACH_GROUP, offload=scratch)
    optimizer = zerofx.AdamW(model.parameters(), lr=0.01)
    checkpoints = Path(folder) / "checkpoints"
    step = zerofx.load(checkpoints, model, optimizer)["step"] if saves and zerofx.latest(checkpoints) else 0
    note = open(Path(folder) / "log", "a", buffering=1) if rank == 0 else None  # noqa: SIM115
    pending: Any = None

    def tell(**fact: Any) -> None:
        if note is not None:
            note.write(json.dumps(fact) + "\n")

    tell(loaded=step, size=size)
    while step != stop:
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        step += 1
        tell(step=step, loss=mean.item() / size, size=size)
        if saves:
            saved = zerofx.save(checkpoints, model, optimizer, step=step, keep=2, background=step % 2 == 1)  # type: ignore
            if pending is not None:
                tell(saved=pending)  # a save waits for the one before
            pending = None if isinstance(saved, Path) else step
            if pending is None:
                tell(saved=step)
    if pending is not None:
        saved.result()
        tell(saved=pending)
    dist.barrier()
    dist.destroy_process_group()


class Run:
    """Lives, one after the other, in ``folder``. ``offload``: the optimizer's state is in files there."""

    def __init__(self, folder: Path, stage: int, offload: bool = False) -> None:
        self.folder, self.stage, self.offload = folder, stage, offload
        self.context = forks()

    def facts(self) -> list[dict[str, Any]]:
        path = self.folder / "log"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def start(self, size: int, stop: int | None = None, saves: bool = True) -> list[Any]:
        rendezvous = tempfile.mktemp(prefix="rendezvous-", dir=self.folder)
        args = (size, str(self.folder), rendezvous, self.stage, stop, saves, self.offload)
        ranks = [self.context.Process(target=live, args=(rank, *args), daemon=True) for rank in range(size)]
        for rank in ranks:
            rank.start()
        return ranks

    def finish(self, ranks: list[Any]) -> None:
        """Wait until all have ended well."""
        for rank in ranks:
            rank.join(PATIENCE)
            assert rank.exitcode == 0, f"a rank ended with {rank.exitcode}, undisturbed"

    def kill(self, ranks: list[Any], choice: random.Random) -> str:
        """Let them live for a random time, then kill; returns in words what was done."""
        known = len(self.facts())
        delay = choice.uniform(0, 0.4)
        trains = choice.random() < 0.8
        if trains:  # for two steps: each of them has been saved, so all groups of ranks exist
            self.wait("train", ranks, lambda: sum("step" in fact for fact in self.facts()[known:]) >= 2)
        time.sleep(delay)
        assert all(rank.is_alive() for rank in ranks), [rank.exitcode for rank in ranks]
        everyone = len(ranks) == 1 or choice.random() < 0.5
        victims = ranks if everyone else [choice.choice(ranks)]
        for rank in victims:
            os.kill(rank.pid, signal.SIGKILL)
        if trains:  # the others hear of it from gloo; while they start, nobody would tell them
            self.wait("notice that one is gone", [], lambda: not any(rank.is_alive() for rank in ranks), hung=ranks)
        return f"{'all' if everyone else 'one'} of {len(ranks)} killed after {delay:.2f} s"

    def wait(self, what: str, alive: list[Any], is_done: Callable[[], bool], hung: Sequence[Any] = ()) -> None:
        """Wait until ``is_done``; ``alive`` must be so all the while."""
        deadline = time.monotonic() + PATIENCE
        while not is_done():
            assert all(rank.is_alive() for rank in alive), [rank.exitcode for rank in alive]
            if time.monotonic() > deadline:
                for rank in [*alive, *hung]:
                    if rank.is_alive():
                        os.kill(rank.pid, signal.SIGUSR1)  # its stacks go to stderr
                time.sleep(1)
                raise AssertionError(f"ranks do not {what} within {PATIENCE:g} s: a hang")
            time.sleep(0.005)


def check(
    folder: Path,
    *,
    kills: int,
    seed: int,
    stage: int = 3,
    sizes: tuple[int, ...] = (2,),
    offload: bool = False,
    say: Any = None,
) -> int:
    """Kill ``kills`` times; returns how many steps were done. Raises AssertionError where something was lost.

    The run that nobody disturbs has its state in memory, also with ``offload``.
    """
    import zerofx

    choice, run = random.Random(seed), Run(folder, stage, offload)
    for i in range(kills):
        size = choice.choice(sizes)
        ranks = run.start(size)
        try:
            what = run.kill(ranks, choice)
        finally:
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()
        facts = run.facts()
        promised = max((fact["saved"] for fact in facts if "saved" in fact), default=0)
        latest = zerofx.latest(folder / "checkpoints")
        found = 0 if latest is None else int(latest.name.strip(".tmp").removeprefix("step-"))
        assert found >= promised, f"kill {i}: step {promised} was saved, the latest checkpoint is of step {found}"
        if say is not None:
            say(f"kill {i + 1:3} of {kills}: {what}; latest checkpoint: step {found}")
    steps = found + 2
    run.finish(run.start(choice.choice(sizes), stop=steps))
    quiet = Run(folder / "undisturbed", stage)
    quiet.folder.mkdir()
    quiet.finish(quiet.start(sizes[0], stop=steps, saves=False))
    expected = {fact["step"]: fact["loss"] for fact in quiet.facts() if "step" in fact}
    seen = [fact for fact in run.facts() if "step" in fact and fact["step"] <= steps]
    assert {fact["step"] for fact in seen} == set(expected), "steps are missing"
    for fact in seen:
        error = abs(fact["loss"] - expected[fact["step"]]) / abs(expected[fact["step"]])
        assert error <= (0 if len(sizes) == 1 else TOLERANCE), (fact, expected[fact["step"]], error)
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--offload", action="store_true", help="with the optimizer's state in files")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    args = parser.parse_args()
    print(f"seed {args.seed}")
    half = args.kills // 2
    for kills, stage, sizes in ((half, 3, (2,)), (args.kills - half, 2, (2, 1, 3))):
        with tempfile.TemporaryDirectory(prefix="zerofx-faults-") as folder:
            start = time.monotonic()
            steps = check(
                Path(folder), kills=kills, seed=args.seed, stage=stage, sizes=sizes, offload=args.offload, say=print
            )
            took = time.monotonic() - start
            print(f"stage {stage}, ranks {sizes}: {kills} kills, {steps} steps, {took:.0f} s: all well")
    return 0


if __name__ == "__main__":
    sys.exit(main())
