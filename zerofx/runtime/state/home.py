"""Where state lives: the shard, the gradient and the optimizer's moments of a group, between their uses.

::

    new(kind, ...)           state is made
    keep(kind, tensor)       state that a graph or an optimizer has made: what stays of it
    with resident():          weights and gradient are on the device: read them, write them
    with resident(exp_avg):   and so are the moments of which these are views
    at rest                  it is wherever the home keeps it

By default state is resident at any time (`OnDevice`), and all of this costs nothing. Another case is a class in a file
of its own, and a line in `HOMES` (`zerofx.features.offload`). It sets ``away``, or ``moments_away``. Then whoever
computes on slices does it inside of `resident`: compiled graphs, gathers, operations on sharded tensors, optimizers,
checkpoints.

Code that knows no homes is given views of state: ``to_local()``, and what torch.distributed.checkpoint reads and
writes. ``keep_resident`` reloads state, and it stays until the last of these views is gone.

Views of a tensor stay views of it: a home that gives memory back empties the storage and fills it again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar, Literal

import torch

from zerofx._torch import with_own_storage
from zerofx.runtime.state.staging import Staging
from zerofx.runtime.state.state_file import StateFile

Kind = Literal["weights", "gradient", "moment"]

Place = StateFile | Staging | None
"""Where the option ``offload`` puts a group's moments: a file; the host's memory, with what lies between that and the
device; or the device."""

_HERE = contextlib.nullcontext()


class Home:
    """Where one group's state lives. A case overrides the first four; one that `streams`, `reload` and `offload`, too.

    Attributes:
        streams: what lives elsewhere and is copied by graphs themselves, piece by piece (`reload`, `offload`).
        away: whether state has to be brought to where it is computed with.
        moments_away: whether moments alone have to be.
        any_away: whether either is so of any home there is.
        hosts: whether moments are in the host's memory, where an optimizer steps.
        file: where the option ``offload`` has put the group's moments, and what it `StateFile.holds` besides; None.
        staging: the moments are in the host's memory, and gradients and weights pass through this to them, or are
            there as well (`Staging.holds`); None.
    """

    streams: frozenset[Kind] = frozenset()
    away = False
    moments_away = False
    hosts = False
    file: StateFile | None = None
    staging: Staging | None = None
    any_away: ClassVar[bool] = False

    @classmethod
    def takes(cls, stage: int, device: torch.device, place: Place) -> bool:
        """Whether groups of this stage, on this device, with their moments in this place, live here."""
        raise NotImplementedError

    def new(self, kind: Kind, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """State of ``numel`` zeros, 1-D."""
        raise NotImplementedError

    def keep(self, kind: Kind, tensor: torch.Tensor) -> torch.Tensor:
        """State that somebody else has made: the tensor to hold from now on."""
        raise NotImplementedError

    def resident(self, *state: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        """Weights and gradient can be computed with inside, and the moments of which ``state`` are views.

        What is written there stays. May be entered again inside.
        """
        raise NotImplementedError

    def has(self, place: Place) -> None:
        """It is made: what the option ``offload`` has for it."""
        self.file = place if isinstance(place, StateFile) else None
        self.staging = place if isinstance(place, Staging) else None

    def moves(self, kind: Kind) -> bool:
        """Whether weights, or gradients, are elsewhere at rest."""
        return self.away or kind in self.streams

    def only(self, *state: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        """``state`` can be computed with inside, weights or a gradient among it; the rest need not be resident."""
        return self.resident(*state)

    def shaping(self, state: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        """Views of ``state`` can be made inside. It need not be resident, and nobody looks at its numbers."""
        return _HERE

    def reload(self, state: torch.Tensor, here: torch.Tensor) -> Future[torch.Tensor]:
        """Start to bring ``state``, 1-D, to ``here``, which is empty, on the device, where a graph reads it.

        Of a home that `streams` weights.
        """
        raise NotImplementedError

    def offload(self, gradient: torch.Tensor) -> Future[torch.Tensor]:
        """Start to take a graph's ``gradient`` here; the tensor to hold from then on. Of a home that `streams` them."""
        raise NotImplementedError

    def on_host(self, state: torch.Tensor, numel: int | None = None) -> torch.Tensor | None:
        """The numbers of ``state``, 1-D, where they are in the host's memory and not on the device; None: they are not.

        ``numel``: so many from where it begins. Who looks at them has to `settle` before.
        """
        return None

    def settle(self, *state: torch.Tensor) -> None:
        """The host waits for copies from and to what `on_host` gives of ``state``."""

    def keep_resident(self, state: torch.Tensor) -> torch.Tensor:
        """``state`` for code that does not enter `resident`: the same memory, while a view of it is left."""
        if not self.away or not state.numel():
            return state
        stack = contextlib.ExitStack()
        stack.enter_context(self.resident())
        view = with_own_storage(state)
        weakref.finalize(view.untyped_storage(), stack.close).atexit = False
        return view


class OnDevice(Home):
    """State is on the device at any time."""

    @classmethod
    def takes(cls, stage: int, device: torch.device, place: Place) -> bool:
        return True

    def new(self, kind: Kind, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def keep(self, kind: Kind, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def resident(self, *state: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        return _HERE


HOMES: list[type[Home]] = [OnDevice]
"""Every case. The first that takes a group is taken."""


def home_of(stage: int, device: torch.device, place: Place = None) -> Home:
    """A home for one group. ``place``: where its moments are to be."""
    home = next(home for home in HOMES if home.takes(stage, device, place))()
    home.has(place)
    Home.any_away |= home.away or home.moments_away
    return home


def all_resident(homes: Iterable[Home]) -> contextlib.AbstractContextManager[Any]:
    """The weights and gradients of several groups can be computed with inside."""
    away = {id(home): home for home in homes if home.away}
    return _entered((home, []) for home in away.values()) if away else _HERE


def resident_of(tensors: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """What these sharded tensors hold can be computed with inside, whatever it is; there may be others among them."""
    if not Home.any_away:
        return _HERE
    found: dict[int, tuple[Home, list[torch.Tensor]]] = {}
    for x in tensors:
        home = x._group.home if hasattr(x, "_local") else None
        if home is not None and (home.away or home.moments_away):
            found.setdefault(id(home), (home, []))[1].append(x._local)
    return _entered(found.values()) if found else _HERE


@contextlib.contextmanager
def _entered(homes: Iterable[tuple[Home, list[torch.Tensor]]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for home, state in homes:
            stack.enter_context(home.resident(*state))
        yield
