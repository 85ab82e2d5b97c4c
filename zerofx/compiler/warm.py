"""A warm start: what a process before this one compiled, from PyTorch's cache on disk.

::

                      key: graph, inputs, PyTorch's settings, and `tag_of`
    first start   ──▶ miss: trace, cut, passes, proofs, code ──────────────▶ written
    next start    ──▶ hit:  code and `Lowered` ──▶ bound to these groups, compared with the other ranks
                            graphs to be read, or another way of backward?  ──▶ traced now (`Warm.compilers`)

What was written has been proved: the graph by `verify`, its code by `check_code`. Who reads the graphs of a warm start
has them traced and rewritten anew, and the code that came from the cache is checked against these.

Some graphs are always compiled: `is_cacheable` says which.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from zerofx import _torch
from zerofx.compiler.compilers import Compilers
from zerofx.compiler.cut import Cut
from zerofx.compiler.lowered import Lowered, LoweredBackward, LoweredForward, backward_of, forward_of, publish
from zerofx.compiler.observed import log
from zerofx.compiler.pair import Pair
from zerofx.compiler.progress import say_served
from zerofx.compiler.records import count
from zerofx.compiler.runners import BackwardCode, backward_runner
from zerofx.compiler.unit import Unit
from zerofx.model.memory import Memory
from zerofx.passes.context import Sync
from zerofx.runtime.state.group import ShardGroup

ROOT = Path(__file__).parent.parent


def is_cacheable(unit: Unit) -> bool:
    """Whether the graph may come from the cache: one that reads parameters, of a run that is no dry one.

    Not with what follows from other ranks, or is decided anew at each cut: partitioned or offloaded activations,
    ``uneven=True``. Nor with passes of a user's, whose source is not known.
    """
    options = unit.options
    if not unit.groups or unit.pretend is not None or not _torch.autograd_cache_is_on():
        return False
    alone = options.partition_activations is None and unit.family.turns is None
    stays = unit.family.activation_store is None
    return alone and stays and not options.passes


def tag_of(unit: Unit) -> str:
    """A digest of all that decides a rewrite and is not in PyTorch's own key."""
    options, family, sharing = unit.options, unit.family, unit.group.sharing
    shared = (sharing.weights, sharing.gradients, sharing.optimizer, sharing.everyone, sharing.replicas)
    ranks = [None if each is None else (each.name, each.rank, each.size) for each in (*shared, sharing.secondary)]
    groups = [
        (*_of_weights(group), group.backend, sorted(group.home.streams), _frozen(group)) for group in family.groups()
    ]
    disk = family.on_disk
    what = (
        source_digest(),
        (options.stage, options.executor, options.memory_budget, options.lookups, options.one_copy, options.buckets),
        (family.stage, family.wire, sorted(family.on_host)),
        None if disk is None else (sorted(disk.kinds), sorted(disk.groups)),
        (ranks, sharing.row_size, sharing.crosses, sharing.two_hops, sharing.divides_between),
        (groups, sorted(unit.names)),
        sorted((i, ref.layout.name, ref.slot) for i, ref in unit.sharded.items()),
        _budgets(unit),
    )
    return "zerofx:" + hashlib.sha256(repr(what).encode()).hexdigest()


def _budgets(unit: Unit) -> Any:
    """Budgets that are divided, and all that a division asks of other graphs and of the machine; None: there are none.

    What is asked once stays the answer (`Footprint`), so graphs that save nothing do not ask.
    """
    options = unit.options
    given = Memory.of(options.memory), options.activation_budget
    if given in ((None, None), (None, 1.0)) or not torch.is_grad_enabled():
        return given
    layouts = frozenset(group.layout.name for group in unit.family.groups())
    others = unit.family.footprint.others(unit.names, layouts)
    return given, others, unit.share, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()


def _of_weights(group: ShardGroup) -> tuple[Any, ...]:
    return group.layout, group.graph_layout, type(group.weights).__name__, group.weights.steps_inside


def _frozen(group: ShardGroup) -> list[str]:
    """Parameters that are not trained now. Of those that a graph reads PyTorch's key knows; stage 0 asks of all."""
    live = ((slot.name, group.members.live(slot)) for slot in group.layout.slots)
    return [name for name, parameter in live if parameter is None or not parameter.requires_grad]


@functools.cache
def source_digest() -> str:
    """A digest of zerofx itself."""
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def source_files() -> list[Path]:
    """zerofx's own files. In a checkout ``passes`` and ``kernels`` are links, which ``rglob`` would not follow."""
    walk = os.walk(ROOT, followlinks=True)
    return sorted(Path(folder, name) for folder, _, names in walk for name in names if name.endswith(".py"))


class CacheMiss(Exception):
    """What was found does not fit. AOTAutograd catches it, and compiles."""


class Warm:
    """What the cache has of one graph.

    Args:
        pair: of the graph.
        again: compiles it, by compilers that are given.
    """

    def __init__(self, pair: Pair, again: Callable[[Compilers], object]) -> None:
        self.pair, self.unit, self._again = pair, pair.unit, again
        self.forward: LoweredForward | None = None
        self._texts: dict[str, str | None] = {}
        self._first: tuple[Sync, bool] | None = None
        self._compilers: dict[tuple[frozenset[str], bool], Compilers] = {}
        self._ambient = _ambient()
        self._surroundings: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def load(self, lowered: Lowered, code: Callable) -> Callable:
        """What runs ``code``, which came from the cache, bound to the groups of this process.

        Raises:
            CacheMiss: it was compiled beside other graphs than there are now.
        """
        self._surroundings = _torch.compile_context()
        log.info("%s: %d groups; from the cache", lowered.name, len(lowered.groups))
        if self.unit.speaks:
            say_served(f"{lowered.name} {count(self.unit.groups.values())}", self.unit.read)
        if isinstance(lowered, LoweredForward):
            if lowered.elsewhere != self.pair.elsewhere(lowered.phase):
                raise CacheMiss("other graphs of the module hold more, or less")
            if lowered.settled is not None:
                Cut(self.pair).settle(lowered.settled)
            publish(lowered.schedules, lowered.fingerprint, self.unit)
            self.forward, self._texts = lowered, {lowered.name: lowered.text}
            self.pair.record.restore = self.compilers
            return forward_of(lowered, code, self.unit)
        assert isinstance(lowered, LoweredBackward)
        publish(lowered.schedules, lowered.fingerprint, self.unit)
        self._texts[lowered.name], self._first = lowered.text, lowered.way
        return backward_runner(self._variants(lowered, code), self.unit.family, lowered.outputs)

    def _variants(self, lowered: LoweredBackward, code: Callable) -> Callable[[Sync, bool], BackwardCode]:
        """The code from the cache where that was written for what is asked; else what is compiled now."""
        ways: dict[tuple[Sync, bool, bool], BackwardCode] = {}
        steps_inside = self.unit.group.weights.steps_inside

        def variant(sync: Sync, steps: bool) -> BackwardCode:
            way, kept = (sync, steps and steps_inside), lowered.donates and _torch.keeps_graph()
            key = (*way, kept)
            if key not in ways:
                served = way == lowered.way and not kept
                if served and lowered.elsewhere == self.pair.elsewhere("backward"):
                    ways[key] = backward_of(lowered, code, self.unit)
                else:
                    fresh = {lowered.name} if served or kept else set()
                    ways[key] = self._compiled_anew(fresh, donates=not kept).variant(*way)
            return ways[key]

        return variant

    def compilers(self) -> Compilers:
        """Those of the graph, once it is traced and rewritten anew; its code is what came from the cache."""
        return self._compiled_anew(set())

    def _compiled_anew(self, fresh: set[str], donates: bool = True) -> Compilers:
        """The same; but for the graphs ``fresh``, whose code is generated."""
        key = frozenset(fresh), donates
        if key not in self._compilers:
            self.pair.record.restore = None
            pair = Pair(self.unit, self.pair.executor)
            pair.record = self.pair.record
            if self.pair.settled is not None:
                pair.adopt(self.pair.settled)
            texts = {name: text for name, text in self._texts.items() if name not in fresh}
            compilers = Compilers(pair, texts, self._first, donates)
            with self._surroundings(), self._ambient():
                self._again(compilers)
            self._compilers[key] = compilers
        return self._compilers[key]


def _ambient() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What a trace depends on besides its graph, as it is now, to be entered again."""
    grad = torch.is_grad_enabled()
    casts = {
        device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    }

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
            for device, (enabled, dtype) in casts.items():
                if torch.is_autocast_enabled(device) != enabled or enabled:
                    stack.enter_context(torch.autocast(device, dtype, enabled))
            yield

    return enter
