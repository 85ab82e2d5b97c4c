"""What there is to choose from for a model, and what each alternative would take.

===========  ==============================================================  ==========================================
option       alternatives                                                    unless
===========  ==============================================================  ==========================================
stage        2, 3 and 0; 1 in the place of 2 where gradients are kept back   it is given, or an option goes with fewer
             (``Memory.no_sync``)
sharding     in stage 3 on a mesh of two dimensions, every scheme            it is given
offload      of a place: nothing; else the optimizer's state; else weights   it is a `zerofx.Offload`, or none is given
             and gradients, too; else activations as well. The next only
             where nothing fits without
wire         nothing, and `QUANTIZED`                                        it is not "auto"
the budgets  as ``memory=`` divides them
===========  ==============================================================  ==========================================

Each is a dry run with ``memory=`` (`zerofx.compiler.division`), on the clock of `zerofx.predict`. Nothing here counts
bytes or seconds of a step.

In the host's memory ("cpu") the optimizer's state alone is compared with that, weights and gradients. Where all of
it is there the step copies nothing, so more on the host may be faster. Weights alone, or gradients, are no alternative:
the step has copies left, and less is free.

Two are not predicted. What takes more than the budget at rest alone cannot fit. And stage 3 is never faster than
stage 2 where that keeps all that there is: it gathers as much, or more often.

Where stage 2 is too large by more than stage 3 has less at rest, nothing is likely to fit. Then any division of stage 3
is looked for first. There is none: the fastest is not looked for, nor what stage 0 would take.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from zerofx._torch import FromDynamo, NotOneGraph
from zerofx.compiler.auto import AUTO
from zerofx.compiler.choices import Division, NotDivided, Search, TooSmall
from zerofx.compiler.division import Trials
from zerofx.compiler.options import Options
from zerofx.compiler.records import GraphRecord
from zerofx.inspect.choose.choice import Alternative
from zerofx.inspect.choose.deep import DEEP, SHALLOW, Survey, followed
from zerofx.inspect.predict.dry_run import dry_graphs
from zerofx.model.grouping import Grouping, plan_groups
from zerofx.model.ignored import ignored_in
from zerofx.model.memory import Memory
from zerofx.model.offload import Offload
from zerofx.model.sharding import SCHEMES
from zerofx.model.stack import Stack
from zerofx.model.units import format_bytes
from zerofx.model.wire import Wire
from zerofx.runtime.ranks.sharing import OneGroup
from zerofx.runtime.state.account import Account, Elements, Terms, at_rest

E = TypeVar("E", bound=BaseException)

QUANTIZED = Wire(weights="int8", gradients="int8")
"""What ``wire="auto"`` allows."""

NEAR = 1.5
"""What takes up to so many times the budget at rest is predicted, to say what more memory would buy."""

OF_PROCESSES = ("mesh", "reduce_group", "init", "init_sync", "device", "timeout", "progress", "cache")
"""Options that say where and how ranks run: they change neither bytes nor seconds."""


@dataclass(frozen=True)
class Question:
    """For what there is to choose.

    Attributes:
        args, call: what the module is called with.
        world_size: ranks; or replicas, and ranks of each.
        memory: with rates.
        backend, device: what graphs are for.
        probe: whether kernels may be run.
        given: options as the user gave them.
        whole: whether the module is one graph.
    """

    module: nn.Module
    args: tuple[Any, ...]
    call: dict[str, Any]
    world_size: int | tuple[int, int]
    memory: Memory
    backend: str
    device: torch.device
    probe: bool
    given: dict[str, Any]
    whole: bool = True

    @property
    def ranks(self) -> str:
        """How many there are, in words."""
        if isinstance(self.world_size, tuple):
            return f"{self.world_size[0]} replicas of {self.world_size[1]} ranks"
        return f"{self.world_size} ranks"

    def alternatives(self) -> list[Alternative]:
        """All of them, in the order in which they were predicted.

        Raises:
            ValueError: the options go with no stage; or part of the module cannot be predicted.
            NotOneGraph: the module is not one graph, and this question is of one that is.
        """
        found: list[Alternative] = []
        for offloads in self._offloads():
            for options in itertools.chain.from_iterable(map(self._candidates, offloads)):
                found.append(self._predicted_beside(options, found))
            if any(each.division is not None for each in found):
                break
        if all(each.impossible for each in found):
            raise ValueError(found[0].why)
        return found

    def _offloads(self) -> Iterator[list[dict[str, Any]]]:
        """What is offloaded: each list is for where nothing fits with those before it."""
        place = self.given.get("offload")
        if not isinstance(place, (str, Path)):
            yield [{} if place is None else {"offload": place}]
            return
        yield [{"offload": None}]
        if place == "cpu" and self.device.type == "cpu":
            return  # the host's memory is where all of it is
        optimizer, state = {"offload": Offload(place)}, {"offload": Offload(place, place, place)}
        yield from [[optimizer, state]] if place == "cpu" else [[optimizer], [state]]
        yield [{"offload": Offload(place, place, place, activations=place)}]

    def _candidates(self, offload: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Options of one alternative each."""
        stage = self.given.get("stage", AUTO)
        middle = 1 if self.memory.no_sync else 2
        for each in (middle, 3, 0) if stage == AUTO else (stage,):
            for scheme, wire in itertools.product(self._schemes(each), self._wires(each)):
                options = {"stage": each, **scheme, **wire, **offload}
                place = offload.get("offload")
                if each != 3 and place is not None and place is not self.given.get("offload"):
                    options["offload"] = replace(place, weights=None)  # they are whole there
                yield options

    def _schemes(self, stage: int) -> list[dict[str, Any]]:
        several = stage == 3 and isinstance(self.world_size, tuple) and self.given.get("sharding") is None
        return [{"sharding": scheme} for scheme in SCHEMES] if several else [{}]

    def _wires(self, stage: int) -> list[dict[str, Any]]:
        if self.given.get("wire") != AUTO:
            return [{}]
        return [{"wire": None}, *([{"wire": QUANTIZED}] if stage else [])]

    def _predicted_beside(self, options: dict[str, Any], others: list[Alternative]) -> Alternative:
        """An alternative; not predicted if it cannot be better than ``others``."""
        for other in others:
            alike = "sharding" not in options
            alike &= all(other.options.get(name) == options.get(name) for name in ("wire", "offload"))
            if alike and options["stage"] == 3 and other.stage in (1, 2) and other.keeps_all:
                return Alternative(options, why=f"no faster than stage {other.stage}, which keeps all that it needs")
        try:
            held = self.at_rest(options, self.world_size)
        except ValueError as e:
            return Alternative(options, why=str(e), impossible=True)
        rest = 0 if held is None else held.weights + held.moments
        hopeless = self._is_hopeless(others, rest)
        near = 1.0 if hopeless and others[-1].stage == 3 else NEAR
        if rest > near * self.memory.nbytes:
            return Alternative(options, why=f"needs more than {format_bytes(rest)} at rest alone")
        if hopeless and options["stage"] == 3 and (found := self.any_that_fits(options)).division is None:
            return found
        return self.predicted(options)

    def _is_hopeless(self, others: list[Alternative], rest: int) -> bool:
        """Whether nothing will fit, most likely: none of ``others`` would with ``rest`` for what they have at rest.

        Then nobody asks how fast it is with more memory, or how much faster.
        """
        if not others or isinstance(self.given.get("offload"), (str, Path)):
            return False
        least = [each.offers[0] for each in others if each.offers and each.division is None]
        return len(least) == len(others) and all(x.needs - x.at_rest + rest > self.memory.nbytes for x in least)

    def any_that_fits(self, options: dict[str, Any], **changed: Any) -> Alternative:
        """As `predicted`; its division is one that fits, and not the fastest, which takes less time to find.

        Of several graphs they are the fastest all the same: with others the first might leave more for those after it.
        """
        return replace(self, **changed).predicted(options, any_fits=self.whole)

    def predicted(self, options: dict[str, Any], any_fits: bool = False) -> Alternative:
        """What an alternative takes."""
        if (deep := self._deep(options, any_fits)) is not None:
            return deep
        try:
            records = self._dry_run(options, Trials.choose_any if any_fits else None)
        except NotOneGraph:
            raise
        except Exception as e:
            return self._refused(options, e)
        forwards = [record.forward for record in records if record.forward is not None]
        activations = [forward.activations for forward in forwards if forward.activations is not None]
        divisions = [forward.division for forward in forwards if forward.division is not None]
        if not activations or not divisions:
            raise ValueError(
                f"{type(self.module).__name__} leaves nothing for a backward: no parameter that is trained takes part "
                "in what it returns, and there is no step to choose for. Give stage= a number, and leave batch= out."
            )
        division, graphs = Division.of_step(divisions), 0 if self.whole else len(divisions)
        saved, whole = sum(each.saved_bytes for each in activations), sum(each.whole_bytes for each in activations)
        return Alternative(options, division, division.offers, saved, whole, graphs)

    def _refused(self, options: dict[str, Any], error: Exception) -> Alternative:
        """An alternative whose dry run has ended so."""
        if (too_small := _in_chain(error, TooSmall)) is not None:
            offers = too_small.offers
            if not self.whole:  # seconds are those of one graph
                offers = tuple(offer._replace(step_s=math.inf) for offer in offers)
            return Alternative(options, offers=offers)
        if (not_divided := _in_chain(error, NotDivided)) is not None:
            raise ValueError(str(not_divided)) from error
        if isinstance(error, ValueError):
            return Alternative(options, why=str(error), impossible=True)
        if self.whole or isinstance(error, FromDynamo):
            raise error
        raise ValueError(
            f"{type(self.module).__name__} is not one graph, and what stands between its graphs does not run without "
            "weights and values, so what it takes is not known ahead. Mend the graph break (TORCH_LOGS=graph_breaks "
            f"names it); or give stage= a number, and leave batch= out. {type(error).__name__}: {error}"
        ) from error

    def _deep(self, options: dict[str, Any], any_fits: bool) -> Alternative | None:
        """What it takes as few of its layers have it; None: it is traced itself."""
        stack = Stack.of(self.module) if self.whole else None
        if stack is None or stack.count < DEEP or self._leaves(options):
            return None
        if stack.nbytes < Grouping.of(self.given.get("groups")).min_bytes:  # layers share groups
            return None
        surveys = [Survey(any_fits) for _ in SHALLOW]
        for count, survey in zip(SHALLOW, surveys, strict=True):
            try:
                replace(self, module=stack.of_first(count))._dry_run(options, survey)
            except NotOneGraph:
                raise
            except Exception:  # of what names a layer that is not there, say: the module itself is asked then
                return None
        if (found := followed(surveys[0], surveys[1], stack.count, self.memory)) is None:
            return None
        layers = (*SHALLOW, stack.count)
        return Alternative(options, found.division, found.offers, found.saved, found.whole, layers=layers)

    def _leaves(self, options: dict[str, Any]) -> bool:
        """Whether activations may leave the device: which of them do is not the same in every layer."""
        offload = Offload.of({**self.given, **options}.get("offload"))
        return offload is not None and offload.activations is not None

    def _dry_run(self, options: dict[str, Any], search: Search | None) -> list[GraphRecord]:
        given = {name: value for name, value in self.given.items() if name not in OF_PROCESSES}
        given |= {"offload": None, **options, "memory": self.memory, "progress": False}
        where: Any = {"world_size": self.world_size, "backend": self.backend, "device": self.device}
        how: Any = {"probe": self.probe, "search": search, "whole": self.whole}
        return dry_graphs(self.module, self.args, self.call, given, **where, **how)

    def at_rest(self, options: dict[str, Any], world_size: int | tuple[int, int]) -> Account | None:
        """What a rank holds between backward and the optimizer's step; None where no layout alone says that.

        Raises:
            ValueError: options that do not go together.
        """
        given = {name: value for name, value in self.given.items() if name not in (*OF_PROCESSES, "memory")}
        checked = Options.of({k: v for k, v in {**given, "offload": None, **options}.items() if k != "sharding"})
        plain = all(type(p) is nn.Parameter for p in self.module.parameters())
        if isinstance(world_size, tuple) or checked.offload is not None or not plain or checked.one_copy:
            return None
        sharing = OneGroup.pretended(world_size, self.backend)
        sharing = sharing if checked.stage else sharing.undivided()  # type: ignore[assignment]
        how: Any = {"backend": self.backend, "code_block": checked.code_block}
        how |= {"mixed_precision": checked.mixed_precision, "ignored": ignored_in(self.module, checked.ignored)}
        held = Account()
        for layout, _ in plan_groups(self.module, sharing.optimizer.size, Grouping.of(checked.groups), **how):
            state = (0, self.memory.moments * layout.dtype.itemsize)
            shared = sharing, sharing.weights.size, sharing.copies
            terms = Terms.of(checked.stage, layout, checked.wire, *shared, optimizer=state)
            held += at_rest(Elements.of(layout, terms), terms, trained=layout.requires_grad)
        return held


def _in_chain(error: BaseException | None, wanted: type[E]) -> E | None:
    """What Dynamo has wrapped."""
    while error is not None and not isinstance(error, wanted):
        error = error.__cause__ or error.__context__
    return error
