"""Mutants of finished graphs, verified, and run beside the graphs they were made of if `verify` accepts them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

import zerofx
from tests.passes.blind.mutations import mutate
from tests.passes.blind.training import Pair, Seen, TrainingStep, difference
from tests.passes.mutants import Block, Graph, Model, another, rewritten
from zerofx.compiler.records import GraphRecord
from zerofx.passes import VerificationError, verify
from zerofx.passes.context import Meanings

Outcome = Literal["refused", "equal", "raises", "wrong"]
WORLD_SIZE = 2


def record(executor: str, *, autocast: bool = False, blocks: int = 3, **options: Any) -> GraphRecord:
    """A model's graphs as ``executor`` would get them; nothing is compiled."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Model(blocks=blocks, table=True), torch.randint(48, (2, 4))
    options["groups"] = zerofx.Grouping([Block, nn.Embedding], min_bytes=0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return zerofx.dry_run(model, x, world_size=WORLD_SIZE, executor=executor, **options)


@dataclass
class Mutant:
    """What became of one."""

    case: str
    seed: int
    kind: str
    what: str
    outcome: Outcome
    why: str = ""

    def __str__(self) -> str:
        return f"{self.case}, seed {self.seed}: {self.kind}: {self.what}: {self.outcome}: {self.why}"


@dataclass
class Case:
    """A pair of correct graphs, and what a step with them computes, in each order that is tried."""

    name: str
    pair: Pair
    orders: tuple[int | None, ...]
    right: list[Seen] = field(default_factory=list)

    @staticmethod
    def of(name: str, record: GraphRecord, **changes: Any) -> Case:
        """The record's graphs, rewritten once more with ``changes`` in their contexts."""
        graphs = rewritten(record, **changes)
        pair = Pair(graphs["forward"], graphs["backward"])
        case = Case(name, pair, (None, 1) if pair.forward[1].executor == "inductor" else (None,))
        assert verify_pair(case.copy()) is None
        case.right = [TrainingStep(case.copy(), WORLD_SIZE, order).run() for order in case.orders]
        for seen in case.right:
            assert all(x is None or x.isfinite().all() for x in seen.values()), name
            assert difference(seen, case.right[0]) is None, name
        return case

    def copy(self) -> Pair:
        """Graphs that may be broken; what both have to share, they share."""
        forward, backward = another(self.pair.forward), another(self.pair.backward)
        handover = replace(forward[1].handover, meanings=Meanings())
        forward[1].handover = backward[1].handover = handover
        return Pair(forward, backward)

    def try_(self, seed: int) -> Mutant:
        """Break the graphs by chance, once; ``seed`` says how."""
        rng = random.Random(f"{self.name} {seed}")
        pair = self.copy()
        phase: Graph = rng.choice(pair.graphs)
        kind, what = mutate(phase, rng)
        mutant = Mutant(self.name, seed, kind, f"{phase[1].phase}: {what}", "equal")
        error = verify_pair(pair)
        if error is not None:
            mutant.outcome, mutant.why = "refused", f"{type(error).__name__} {getattr(error, 'rule', '')}"
            return mutant
        for order, right in zip(self.orders, self.right, strict=True):
            try:
                seen = TrainingStep(pair, WORLD_SIZE, order).run()
            except Exception as error:  # operators refuse arguments in many ways
                mutant.outcome, mutant.why = "raises", f"{type(error).__name__}: {error}"
                return mutant
            different = difference(seen, right)
            if different is not None:
                mutant.outcome, mutant.why = "wrong", f"{different}, order {order}"
                return mutant
        return mutant


def verify_pair(pair: Pair) -> Exception | None:
    """What `verify` says of the two, forward first."""
    try:
        for gm, ctx in pair.graphs:
            gm.graph.lint()
            verify(gm, ctx)
    except VerificationError as error:
        return error
    except Exception as error:  # a graph that cannot be read is not run either
        return error
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Small tensors are slower on more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
