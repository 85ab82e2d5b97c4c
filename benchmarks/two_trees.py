"""Median seconds of a training step of this tree's zerofx or another's, to compare versions in turns.

    for i in 1 2 3; do for tree in ../before .; do python benchmarks/two_trees.py $tree; done; done

A GPT of 8 layers, of width 64 (small) and 512 (large), SGD, two gloo ranks with a core each, the eager executor, stages
0 and 3. Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

TREE = str(Path(sys.argv[1]).resolve())
sys.path.insert(0, TREE)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

SIZES = {"small": (64, 45), "large": (512, 25)}
"""Width, and steps, of which the first 8 do not count."""


def run(rank: int, store: str, answer: str) -> None:
    """One rank."""
    os.sched_setaffinity(0, {rank})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    import zerofx
    from tests.models import GPT

    found: dict[str, float | str] = {"from": str(zerofx.__file__)}
    for size, (dim, steps) in SIZES.items():
        for stage in (0, 3):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = zerofx.compile(GPT(8, dim, 8, 512, 64), stage=stage, executor="eager")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            x, y = torch.randint(512, (2, 2, 64), generator=torch.Generator().manual_seed(rank))
            times = []
            for _ in range(steps):
                dist.barrier()
                began = time.perf_counter()
                model(x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
                times.append(time.perf_counter() - began)
            found[f"{size} stage {stage}"] = statistics.median(times[8:])
    if rank == 0:
        Path(answer).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # torch sometimes aborts as the interpreter ends, with threads of gloo still there


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"file://{folder}/store", f"{folder}/answer"), nprocs=2)
        print(Path(folder, "answer").read_text())
