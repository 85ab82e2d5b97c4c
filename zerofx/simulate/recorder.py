"""What runs, noted: every operator, every collective, every storage that comes and goes.

::

    operations    kernel mm, start all-gather, kernel gelu, wait, ...      what ran, with flops and bytes
    changes       buffer made before 3, freed before 7, ...                 what memory it took

`zerofx.simulate.rehearsal` runs graphs on fake tensors under a `Recorder`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from zerofx import _torch
from zerofx._torch import OpOverload
from zerofx.passes.context import Context
from zerofx.passes.kinds import PICKING
from zerofx.runtime.optim.moved import Moved
from zerofx.runtime.state.raw_file import padded
from zerofx.simulate.asked import noting
from zerofx.simulate.workspace import Workspaces

Kind = Literal["weights", "activations", "gradients", "temporary"]
KINDS: tuple[Kind, ...] = ("weights", "activations", "gradients", "temporary")
"""What bytes are for: gathered weights; what forward saves for backward; packed, received and reduced gradients."""


@dataclass(frozen=True)
class Operation:
    """One step of a graph's code.

    Attributes:
        name: the FX node's name, or the kernel's that Inductor wrote.
        kind: "kernel"; or "start" or "wait" of a collective, or of what a file gives or takes.
        group: a kernel's is the group that was waited for last: the layer at work.
        source: ``file:line`` of the user's line; "" where the code does not say.
        flops: of a kernel, by PyTorch's own formulas; 0 for what has none.
        nbytes: a kernel's: read and written. A start's: received, and as many sent, by this rank.
        collective: the same number for a start and its wait; -1 for a kernel.
        far: of a start's bytes, those that come from other rows of a mesh of two dimensions.
        read, written: of a start that is no collective, bytes from this rank's file, and into it (`zerofx.Offload`);
            both of an update (`zerofx.step_in_backward`).
        on_host: that is pinned memory of the host, and no file.
    """

    name: str
    kind: Literal["kernel", "start", "wait"]
    group: str = ""
    source: str = ""
    flops: int = 0
    nbytes: int = 0
    collective: int = -1
    far: int = 0
    read: int = 0
    written: int = 0
    on_host: bool = False

    @property
    def through_file(self) -> int:
        """What a file gives and takes; 0 for all else."""
        return self.read + self.written


@dataclass(eq=False)
class Buffer:
    """A storage that the step allocates."""

    nbytes: int
    kind: Kind = "temporary"


@dataclass(frozen=True)
class Change:
    """``buffer`` is made (or freed) before operation number ``before`` of its phase."""

    before: int
    buffer: Buffer
    made: bool


@dataclass
class Phase:
    """What one graph does: forward or backward of the ``graph``-th that Dynamo captured."""

    graph: int
    name: str
    operations: list[Operation]
    changes: list[Change]


class About(NamedTuple):
    """What a collective is about: whose, what it brings, over how many ranks, and how many of these are in one row."""

    group: str
    kind: Kind
    ranks: int
    here: int


class Code(Protocol):
    """What a recorder asks of the code that runs.

    Attributes:
        context: what the passes know of its graph.
        world_size: how many ranks there are.
        groups: by what a collective does and the bytes of the whole: what it is about. In order.
        updates: what it moves through a file to update a group (`zerofx.step_in_backward`), by the group's name.
    """

    context: Context
    world_size: int
    groups: dict[tuple[str, int], deque[About]]
    updates: Mapping[str, Moved]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in an operator's arguments, or in what it returns: pytree's way takes ten times as long."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [x for each in value for x in tensors_in(each)]


class Recorder(_torch.TorchDispatchMode):
    """Notes every operator that runs under it, and every storage that comes and goes.

    Attributes:
        workspaces: what kernels take inside of themselves; None: it is not asked.
        operations, changes: what was noted.
        name, source, group: of the node that runs, its line in the model, and the group at work.
        on_its_way: from and to a file, by what a feature knows it by: the transfer's number, and its memory.
    """

    def __init__(self, workspaces: Workspaces | None = None) -> None:
        super().__init__()
        self.workspaces = workspaces
        self.operations: list[Operation] = []
        self.changes: list[Change] = []
        self.name: str = ""
        self.source: str = ""
        self.group: str = ""
        self._buffers: dict[int, tuple[weakref.ref[Any], Buffer | None]] = {}  # by storage; None: there before
        self._pending: dict[int, tuple[int, str, Any]] = {}  # by storage: number, group, what it must not lose
        self.on_its_way: dict[tuple[Any, ...], tuple[int, torch.Tensor]] = {}
        self._code: Code | None = None
        self._started = 0
        self._seen = True

    @contextmanager
    def phase(self, graph: int, name: str, code: Code) -> Iterator[Phase]:
        """What is noted inside belongs to ``code``."""
        self.operations, self.changes, self.name, self.source, self.group = [], [], "", "", ""
        self._code = code
        yield Phase(graph, name, self.operations, self.changes)

    @property
    def world_size(self) -> int:
        """Of the graph that runs."""
        assert self._code is not None
        return self._code.world_size

    @property
    def context(self) -> Context:
        """What the passes know of it."""
        assert self._code is not None
        return self._code.context

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What runs inside is not noted."""
        self._seen = False
        try:
            yield
        finally:
            self._seen = True

    def last(self) -> str:
        """What was noted last, for error messages."""
        return self.name or (self.operations[-1].name if self.operations else "its beginning")

    # ------------------------------------------------------------------ operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._seen:
            return func(*args, **kwargs)
        if (noted := noting(func)) is not None:
            return noted(self, func, *args)
        if func is torch.ops.zerofx.step.default and self._code is not None and args[1] in self._code.updates:
            return self._update(args[0], args[1], self._code.updates[args[1]])
        name = func._schema.name.split("::")[1]
        if name == "wait_tensor":
            self._wait(args[0])
            return args[0]
        out = args[0] if name == "all_reduce_" else func(*args, **kwargs)
        tensors = tensors_in(out)
        made = [x for x in tensors if self._is_new(x)]
        for x in made:
            self.allocate(x)
        if name in _WIRE:
            self._start(func, args[0], out)
        elif name not in _FREE and (made or _writes(func)):
            self.kernel(name, func, args, kwargs, out)
            if name in _DECODES:
                self.classify(out, self._kind(args[0]) or "temporary")
        return out

    def kernel(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note a kernel that computes ``out`` by ``func`` (or, where it is None, something without a formula)."""
        read = tensors_in((args, kwargs))
        written = tensors_in(out)
        writes, bound = {id(x) for x in written}, max(map(nbytes_of, written), default=0)
        nbytes = sum(map(nbytes_of, written))
        for x in {id(x): x for x in read if id(x) not in writes}.values():
            # A kernel that picks from a table, or takes a bias out of a gathered buffer, does not read all of it.
            picks = name in _PICKS or name in PICKING or (func is None and self._kind(x) == "weights")
            nbytes += min(nbytes_of(x), bound) if picks else nbytes_of(x)
        flops = 0 if func is None else flops_of(func, args, kwargs, out)
        if self.workspaces is not None and (flops or _may_take(func)):
            self._take_and_give_back(self.workspaces, func, args, kwargs)
        self.operations.append(
            Operation(self.name or name, "kernel", self.group, self.source, flops=flops, nbytes=nbytes)
        )

    def refresh(self, replica: torch.Tensor, about: About, nbytes: int) -> None:
        """The gather of ``nbytes`` that brings a replica, or a shard, up to date; a graph's caller starts it."""
        self._note_start(f"refresh_{about.group}", about, nbytes, replica, None)

    def _start(self, func: Any, source: torch.Tensor, out: torch.Tensor) -> None:
        assert self._code is not None
        name, whole = func._schema.name.split("::")[1], nbytes_of(whole_of(func, source, out))
        groups = self._code.groups[family_of(func), whole]
        about = groups.popleft() if groups else About("", "temporary", self._code.world_size, self._code.world_size)
        self.classify(source, about.kind)
        self.classify(out, about.kind)
        held = None if name == "all_gather_pairwise" else source
        self._note_start(self.name or name, about, _WIRE[name] * whole, out, held)

    def _note_start(self, name: str, about: About, whole: int, out: torch.Tensor, held: Any) -> None:
        received = whole * (about.ranks - 1) // about.ranks
        far = received if about.here == 1 else whole * (about.ranks - about.here) // about.ranks
        number, self._started = self._started, self._started + 1
        self._pending[_key(out)] = number, about.group, held
        self.operations.append(Operation(name, "start", about.group, self.source, 0, received, number, far))

    def _wait(self, x: torch.Tensor) -> None:
        number, group, _ = self._pending.pop(_key(x), (-1, "", None))
        if number < 0:  # a replica that nothing had to refresh, or a second wait
            return
        if self._kind(x) in (None, "weights"):
            self.group = group
        self.operations.append(Operation(self.name or "wait_tensor", "wait", group, self.source, collective=number))

    # ------------------------------------------------------------------ files

    def transfer(self, name: str, group: str, read: int = 0, written: int = 0, *, on_host: bool = False) -> int:
        """Note that bytes start on their way from or to this rank's file, or the host's; the number to `arrived`."""
        number, self._started = self._started, self._started + 1
        if not on_host:
            read, written = padded(read), padded(written)
        said: Any = {"collective": number, "read": read, "written": written, "on_host": on_host}
        self.operations.append(Operation(name, "start", group, self.source, **said))
        return number

    def arrived(self, name: str, group: str, number: int) -> None:
        """Note that compute waits for a transfer."""
        self.operations.append(Operation(name, "wait", group, self.source, collective=number))

    def _update(self, gradient: torch.Tensor, group: str, moved: Moved) -> Any:
        """The optimizer's step of a group whose state passes through memory: read ahead, updated, written behind."""
        name = self.name or "step"
        number = self.transfer(name, group, read=moved.state, written=moved.state) if moved.state else None
        kernel = Operation(name, "kernel", self.group, self.source, nbytes=moved.touched)
        self.operations.append(kernel)
        if number is not None:
            self.arrived(name, group, number)
        with self.unseen():
            return gradient.new_empty(0)

    def give_back(self, nbytes: int) -> None:
        """So much is taken and given back at once."""
        buffer = Buffer(nbytes, "gradients")
        self.changes += [Change(len(self.operations), buffer, made) for made in (True, False)]

    # ------------------------------------------------------------------ memory

    def know(self, x: torch.Tensor) -> None:
        """``x`` was there before."""
        self._watch(x, None)

    def allocate(self, x: torch.Tensor) -> None:
        """``x`` is new."""
        nbytes = x.untyped_storage().nbytes()
        if nbytes:
            buffer = Buffer(nbytes)
            self._watch(x, buffer)
            self.changes.append(Change(len(self.operations), buffer, True))

    def _take_and_give_back(self, workspaces: Workspaces, func: Any, args: Any, kwargs: Any) -> None:
        """What the next operation takes inside; how much that is will be known when the rehearsal is over."""
        buffer = Buffer(0)
        self.changes += [Change(len(self.operations), buffer, made) for made in (True, False)]

        def known(nbytes: int) -> None:
            buffer.nbytes = nbytes

        workspaces.want(func, args, kwargs, known)

    def free(self, x: torch.Tensor) -> None:
        """The storage of ``x`` is given back while there are still references to it."""
        _, buffer = self._buffers[_key(x)]
        if buffer is not None:
            self._watch(x, None)
            self.changes.append(Change(len(self.operations), buffer, False))

    def classify(self, x: torch.Tensor, kind: Kind, *, whatever: bool = False) -> None:
        """Say what the storage of ``x`` is for, if nothing better is known (or ``whatever`` is)."""
        _, buffer = self._buffers.get(_key(x), (None, None))
        if buffer is not None and (whatever or buffer.kind == "temporary"):
            buffer.kind = kind

    def _kind(self, x: torch.Tensor) -> Kind | None:
        _, buffer = self._buffers.get(_key(x), (None, None))
        return buffer.kind if buffer is not None else None

    def _is_new(self, x: torch.Tensor) -> bool:
        return _key(x) not in self._buffers

    def _watch(self, x: torch.Tensor, buffer: Buffer | None) -> None:
        key = _key(x)

        def gone(_: Any) -> None:
            del self._buffers[key]
            if buffer is not None:
                self.changes.append(Change(len(self.operations), buffer, False))

        self._buffers[key] = weakref.ref(x.untyped_storage(), gone), buffer


# Bytes received, as a multiple of (M - 1)/M of the whole; functional collectives and our own.
_WIRE = {
    "all_gather_into_tensor": 1,
    "all_gather_pairwise": 1,
    "reduce_scatter_tensor": 1,
    "all_to_all_pairwise": 1,
    "all_to_all_single": 1,
    "all_reduce": 2,
    "all_reduce_": 2,
}
_DECODES = frozenset(["dequantize"])  # what is read of weights in codes are weights
_FREE = frozenset("empty empty_strided empty_like new_empty new_empty_strided".split())
_PICKS = frozenset("embedding index index_select gather".split())


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Floating-point operations by `torch.utils.flop_counter`'s formulas; 0 for an operator without one."""
    packet = getattr(func, "_overloadpacket", func)
    formula = flop_registry.get(packet) or _FORMULAS.get(packet)
    if formula is None:
        return 0
    positional = list(args)  # formulas take their arguments by place
    for argument in packet.default._schema.arguments[len(args) :]:
        if argument.kwarg_only or argument.name not in kwargs:
            break
        positional.append(kwargs[argument.name])
    return int(formula(*positional, out_val=out))


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


_FORMULAS: dict[Any, Callable[..., int]] = {  # in PyTorch's own table since 2.15
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def family_of(target: Any) -> str:
    """What a collective does: "gather", "reduce" or "all_reduce"."""
    name = target._schema.name
    return "gather" if "gather" in name else "all_reduce" if "all_reduce" in name else "reduce"


def whole_of(target: Any, source: Any, out: Any) -> Any:
    """The tensor of all ranks' data that a collective is about."""
    return out if family_of(target) == "gather" else source


def _writes(func: Any) -> bool:
    return isinstance(func, OpOverload) and func._schema.is_mutable


def _may_take(func: Any) -> bool:
    """Whether ``func`` may be run by itself for what it takes inside: PyTorch's do nothing beside their results."""
    return isinstance(func, OpOverload) and func.namespace == "aten"


def nbytes_of(x: torch.Tensor) -> int:
    """Bytes of ``x``, an expanded dimension counted once."""
    numel = 1
    for size, stride in zip(x.shape, x.stride()):
        numel *= 1 if stride == 0 else size
    return int(numel) * x.dtype.itemsize


def _key(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata
