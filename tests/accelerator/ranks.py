"""Ranks whose processes have the simulated accelerator, and who reach each other as over NCCL.

Processes of their own: a device that was registered stays, and `VARIABLES` holds for good.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from tests.workers import Workers

VARIABLES = {
    "TRITON_INTERPRET": "1",
    "TORCH_FR_BUFFER_SIZE": "0",  # 2.15's flight recorder asks for a name that a process group in Python does not have
}


def on_accelerator(workers: Workers, call: str, *args: Any, timeout: float = 120) -> list[Any]:
    """By rank, what ``call``, "module:function", returns there."""
    found = workers.run("tests.accelerator.ranks:here", call, args, timeout=timeout)
    assert "tests.accelerator.device" not in sys.modules, f"{call} returns what this process imports the device for"
    return found


def here(call: str, args: tuple[Any, ...]) -> Any:
    _join()
    module, _, name = call.partition(":")
    return getattr(importlib.import_module(module), name)(*args)


def _join() -> None:
    """The default process group becomes one of the accelerator's, once."""
    import torch.distributed as dist

    from tests.accelerator import group

    if dist.get_backend() == group.NAME:
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(group.NAME, store=dist.PrefixStore("sim", server), rank=rank, world_size=size)
