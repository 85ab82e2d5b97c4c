"""What optimizers did, as a rank tells it to the others: how often they stepped, and what was frozen then.

::

    rank 0    backward, step, backward, step, forward [2 steps]
    rank 1    backward, step, backward,       forward [1 step]      out of step: its weights are of another step

Each rank updates other parts of the same weights. So where one rank steps and another does not, the weights are a
mixture of two steps. So they are where a parameter is frozen on one rank alone: there its part is not updated.
Every rank steps the same optimizers, whatever parts it holds. So the counts are compared, with each graph
(`zerofx.runtime.ranks.watch`), with each checkpoint (`zerofx.checkpoint.ranks`), and as the program ends.
"""

from __future__ import annotations

import hashlib
import json

import torch.distributed as dist


class Steps:
    """What the optimizers over the parameters of one process group did on this rank.

    Attributes:
        count: how often one of them stepped.
        told: all this as a text, equal where it is.
    """

    def __init__(self, store: dist.Store) -> None:
        self.count: int = 0
        self.told: str = "0."
        self._store = store
        self._frozen: dict[str, tuple[str, ...]] = {}
        self._digest = ""

    def stepped(self) -> None:
        """One of them has stepped."""
        self.count += 1
        self.told = f"{self.count}.{self._digest}"

    def froze(self, group: str, names: tuple[str, ...]) -> None:
        """As one stepped, these were the parameters of ``group`` that require no gradient."""
        if self._frozen.get(group, ()) == names:
            return
        self._frozen[group] = names
        everything = json.dumps(sorted({name for names in self._frozen.values() for name in names}))
        self._digest = hashlib.sha256(everything.encode()).hexdigest()[:16]
        self._store.set(f"frozen/{self._digest}", everything)
        self.told = f"{self.count}.{self._digest}"


def difference_of_steps(store: dist.Store, mine: str, theirs: str, rank: int, other: int) -> str:
    """What differs in `Steps.told` of two ranks, as a sentence that says what to do."""
    (a, frozen_here), (b, frozen_there) = mine.split("."), theirs.split(".")
    if a != b:
        return (
            f"rank {rank} has stepped its optimizers {times(a)} and rank {other} {times(b)}. Their parts of the "
            "weights are of different steps. Step on every rank or on none (docs/debugging.md)."
        )
    here, there = (set(json.loads(store.get(f"frozen/{x}"))) if x else set() for x in (frozen_here, frozen_there))
    name = sorted(here ^ there)[0]
    frozen, trained = (rank, other) if name in here else (other, rank)
    return (
        f"{name!r} requires no gradient on rank {frozen}, and does on rank {trained}. Each rank updates a part of it, "
        "so it is trained by halves. Set requires_grad alike on every rank (docs/debugging.md)."
    )


def times(count: object) -> str:
    """A count in words."""
    return "once" if str(count) == "1" else f"{count} times"
