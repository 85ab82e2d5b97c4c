"""What a graph does when it runs: its executor's code, run on tensors without memory, every step of it noted.

::

    graph, as lowered ──▶ eager:     its nodes, one by one  ──┐  on fake tensors     operations: kernels, starts, waits
    Inductor's code   ──▶ inductor:  the wrapper it wrote   ──┘  ─────────────────▶  changes: storages made and freed

Nothing is modelled that can be looked at: which intermediates exist, which views share memory, what is reused and when
the last reference to a buffer goes is what Python, FX and Inductor's memory planning do with it. Memory that a kernel
takes and gives back inside of itself is not seen, unless kernels may be run (workspace.py). A step is run as a whole,
forward graphs in order, backward graphs the other way round: what forward saves are the tensors that backward gets.

Three things are added, because no code says them:

* a collective holds on to what it sends until it is waited for (a pairwise gather sends its part of the result);
* the replicas of stages 1 and 2 are refreshed before the forward that reads them first;
* ``.grad`` is None when backward starts, and becomes the reduced gradients.
"""

from __future__ import annotations

import re
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from zerofx import _torch
from zerofx._torch import OpOverload, pytree
from zerofx.compiler.records import GraphRecord, Trace
from zerofx.inspect.predict import inductor_code
from zerofx.inspect.predict.workspace import Workspaces
from zerofx.passes import edit, pipeline
from zerofx.passes.ops import discard

Kind = Literal["weights", "activations", "gradients", "temporary"]
KINDS: tuple[Kind, ...] = ("weights", "activations", "gradients", "temporary")
"""What bytes are for: gathered weights; what forward saves for backward; packed, received and reduced gradients."""


@dataclass(frozen=True)
class Operation:
    """One step of a graph's code.

    Attributes:
        name: the FX node's name, or the kernel's that Inductor wrote.
        kind: "kernel"; or "start" or "wait" of a collective.
        group: a kernel's is the group that was waited for last: the layer at work.
        source: ``file:line`` of the user's line; "" where the code does not say.
        flops: of a kernel, by PyTorch's own formulas; 0 for what has none.
        nbytes: a kernel's: read and written. A start's: received, and as many sent, by this rank.
        collective: the same number for a start and its wait; -1 for a kernel.
    """

    name: str
    kind: Literal["kernel", "start", "wait"]
    group: str = ""
    source: str = ""
    flops: int = 0
    nbytes: int = 0
    collective: int = -1


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


def rehearse(records: list[GraphRecord], probe: bool = False) -> list[Phase]:
    """Run forward and backward of ``records`` once on fake tensors; what each graph did, in the order they ran.

    Dimensions that are symbols have the size they had when the graph was captured. ``probe``: kernels with a formula
    for their arithmetic (products, convolutions, attention) are run once too, for the memory that they take inside.

    Raises:
        RuntimeError: a graph has no backward yet, or its code cannot be run without numbers.
    """
    for i, record in enumerate(records):
        if record.forward is None or _backward(record) is None:
            raise RuntimeError(
                f"graph {i} of {len(records)} has no backward yet: it is compiled when it first runs. Call "
                "loss.backward() once before zerofx.predict."
            )
    # Made before any tensor of ours is: passes run in the graphs' own fake tensor mode.
    forwards = [_Code(record.forward) for record in records]  # type: ignore[arg-type]
    backwards = [_Code(_backward(record)) for record in records]  # type: ignore[arg-type]
    recorder = Recorder(Workspaces() if probe else None)
    step = _Step(recorder)
    phases = []
    with torch.no_grad(), _torch.fake_mode(), recorder:
        for i, code in enumerate(forwards):
            with recorder.phase(i, "forward", code) as phase:
                step.forward(i, code)
            phases.append(phase)
        for i, code in reversed(list(enumerate(backwards))):
            with recorder.phase(i, "backward", code) as phase:
                step.backward(i, code)
            phases.append(phase)
    if recorder.workspaces is not None:
        recorder.workspaces.measure()
    return phases


def _backward(record: GraphRecord) -> Trace | None:
    """The variant that a step ran which accumulated nothing."""
    return record.backward or record.backward_step


class _Code:
    """One graph as its executor gets it."""

    def __init__(self, trace: Trace) -> None:
        self.text, self.context = trace.code, trace.context
        # What a dry run wrote for Inductor was never generated: the graph as the other executor would get it.
        self.eager = trace.pretended or trace.context.executor == "eager"
        self.gm = trace.after(pipeline(trace.context.stage)[-1].__name__, executor="eager" if self.eager else None)
        self.inputs: list[Node] = self.gm.graph.find_nodes(op="placeholder")
        outputs = edit.output_values(trace.before.graph)
        self.saved = {i: outputs[i].name for i in self.context.saved if isinstance(outputs[i], Node)}
        layouts = [*self.context.shards, *(reduction.layout for reduction in self.context.reductions)]
        self.world_size = layouts[0].world_size if layouts else 1
        # Whose a collective is, is told by what it does and how large it is: generated code does not say.
        self.groups: dict[tuple[str, int], deque[tuple[str, Kind]]] = defaultdict(deque)
        tagged = trace.before_lower().graph
        for node in edit.tagged(tagged, *_BRINGS):
            whole, tag = _whole(node.target, node.args[0].meta["val"], node.meta["val"]), node.meta["zerofx"]  # type: ignore[union-attr]
            self.groups[_family(node.target), _nbytes(whole)].append((tag.group, _BRINGS[tag.kind]))

    def run(self, recorder: Recorder, inputs: list[Any]) -> list[Any]:
        """The outputs for ``inputs``, which Inductor's code takes out of the list as it reads them."""
        if not self.eager and self.text is None:
            raise RuntimeError(
                f"Inductor kept no Python code of a {self.context.phase} graph (a C++ wrapper?): its memory is not "
                'known. Compile with executor="eager", or without torch._inductor.config.cpp_wrapper.'
            )
        try:
            if self.text is None:
                return list(_Run(self.gm, recorder).boxed_run(inputs))
            return list(inductor_code.load(self.text, recorder)(inputs))
        except Exception as error:
            raise RuntimeError(
                f"a {self.context.phase} graph cannot be followed without numbers, near {recorder.last()}: "
                f"{type(error).__name__}: {error}"
            ) from error


class _Step:
    """What a step holds from one graph to the next."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.saved: dict[int, dict[str, torch.Tensor]] = {}
        self.gradients: list[torch.Tensor] = []
        self.has_gradient: set[Any] = set()
        self.refreshed: set[Any] = set()

    def forward(self, i: int, code: _Code) -> None:
        inputs, layouts = [self._input(node) for node in code.inputs], code.context.shards
        if code.context.stage in (1, 2):
            for layout, replica in zip(layouts, inputs[len(inputs) - len(layouts) :], strict=True):
                if layout not in self.refreshed and layout.requires_grad and layout.world_size > 1:
                    self.recorder.refresh(replica, layout.name)
                self.refreshed.add(layout)
        outputs = code.run(self.recorder, inputs)
        self.saved[i] = {name: outputs[k] for k, name in code.saved.items() if isinstance(outputs[k], torch.Tensor)}
        for value in self.saved[i].values():
            self.recorder.classify(value, "activations")

    def backward(self, i: int, code: _Code) -> None:
        saved = self.saved.pop(i)
        inputs = []
        for node in code.inputs:
            name, tag = node.name, node.meta.get("zerofx")
            if tag is not None and tag.kind == "gathered":
                name = code.context.kept_gathered[tag.group].saved
            if name in saved:
                inputs.append(saved.pop(name))
            else:
                inputs.append(self._input(node))
                if node.name.startswith("tangents"):
                    self.recorder.allocate(inputs[-1])
        saved.clear()
        reductions = code.context.reductions
        outputs = code.run(self.recorder, inputs)
        for reduction, gradient in zip(reductions, outputs[len(outputs) - len(reductions) :], strict=True):
            self.recorder.classify(gradient, "gradients", whatever=True)
            slots = {(reduction.layout, slot) for slot in reduction.slots}
            if slots - self.has_gradient:  # else it is added to what is there
                self.gradients.append(gradient)
            self.has_gradient |= slots

    def _input(self, node: Node) -> Any:
        """What is there before the graph runs: not the step's to allocate."""
        value = _torch.without_symbols(node.meta["val"])
        if not isinstance(value, torch.Tensor):
            return value
        shape, stride = _torch.without_symbols((tuple(value.shape), value.stride()))
        with self.recorder.unseen():
            made = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
        self.recorder.know(made)
        return made


class _Run(Interpreter):
    """The eager executor on fake tensors: values go after their last use, inputs too."""

    def __init__(self, gm: GraphModule, recorder: Recorder) -> None:
        super().__init__(gm)
        self.recorder = recorder

    def run_node(self, n: Node) -> Any:
        self.recorder.name, self.recorder.source = n.name, source_of(n)
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is discard:
            return self.recorder.free(args[0])
        return super().call_function(target, args, kwargs)


class Recorder(_torch.TorchDispatchMode):
    """Notes every operator that runs under it, and every storage that comes and goes."""

    def __init__(self, workspaces: Workspaces | None = None) -> None:
        super().__init__()
        self.workspaces = workspaces
        self.operations: list[Operation] = []
        self.changes: list[Change] = []
        self.name = self.source = self.group = ""
        self._buffers: dict[int, tuple[weakref.ref[Any], Buffer | None]] = {}  # by storage; None: there before
        self._pending: dict[int, tuple[int, str, Any]] = {}  # by storage: number, group, what it must not lose
        self._code: _Code | None = None
        self._started = 0
        self._seen = True

    @contextmanager
    def phase(self, graph: int, name: str, code: _Code) -> Iterator[Phase]:
        """What is noted inside belongs to ``code``."""
        self.operations, self.changes, self.name, self.source, self.group = [], [], "", "", ""
        self._code = code
        yield Phase(graph, name, self.operations, self.changes)

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
        name = func._schema.name.split("::")[1]
        if name == "wait_tensor":
            self._wait(args[0])
            return args[0]
        out = args[0] if name == "all_reduce_" else func(*args, **kwargs)
        tensors = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        made = [x for x in tensors if self._is_new(x)]
        for x in made:
            self.allocate(x)
        if name in _WIRE:
            self._start(func, args[0], out)
        elif name not in _FREE and (made or _writes(func)):
            self.kernel(name, func, args, kwargs, out)
        return out

    def kernel(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note a kernel that computes ``out`` by ``func`` (or, where it is None, something without a formula)."""
        read = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        written = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        writes, bound = {id(x) for x in written}, max(map(_nbytes, written), default=0)
        nbytes = sum(map(_nbytes, written))
        for x in {id(x): x for x in read if id(x) not in writes}.values():
            # A kernel that picks from a table, or takes a bias out of a gathered buffer, does not read all of it.
            picks = name in _PICKS or (func is None and self._kind(x) == "weights")
            nbytes += min(_nbytes(x), bound) if picks else _nbytes(x)
        flops = 0 if func is None else flops_of(func, args, kwargs, out)
        if flops and self.workspaces is not None:
            self._take_and_give_back(self.workspaces, func, args, kwargs)
        self.operations.append(
            Operation(self.name or name, "kernel", self.group, self.source, flops=flops, nbytes=nbytes)
        )

    def refresh(self, replica: torch.Tensor, group: str) -> None:
        """The gather that brings a replica up to date, started by the caller of the graph."""
        self._note_start(f"refresh_{group}", group, _nbytes(replica), replica, None)

    def _start(self, func: Any, source: torch.Tensor, out: torch.Tensor) -> None:
        assert self._code is not None
        name, whole = func._schema.name.split("::")[1], _nbytes(_whole(func, source, out))
        groups = self._code.groups[_family(func), whole]
        group, kind = groups.popleft() if groups else ("", "temporary")
        self.classify(source, kind)
        self.classify(out, kind)
        held = None if name == "all_gather_pairwise" else source
        self._note_start(self.name or name, group, _WIRE[name] * whole, out, held)

    def _note_start(self, name: str, group: str, whole: int, out: torch.Tensor, held: Any) -> None:
        assert self._code is not None
        received = whole * (self._code.world_size - 1) // self._code.world_size
        number, self._started = self._started, self._started + 1
        self._pending[_key(out)] = number, group, held
        self.operations.append(Operation(name, "start", group, self.source, nbytes=received, collective=number))

    def _wait(self, x: torch.Tensor) -> None:
        number, group, _ = self._pending.pop(_key(x), (-1, "", None))
        if number < 0:  # a replica that nothing had to refresh, or a second wait
            return
        if self._kind(x) in (None, "weights"):
            self.group = group
        self.operations.append(Operation(self.name or "wait_tensor", "wait", group, self.source, collective=number))

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
    "all_reduce": 2,
    "all_reduce_": 2,
}
_BRINGS: dict[str, Kind] = {
    "all_gather": "weights",
    "reduce_scatter": "gradients",
    "all_reduce": "gradients",
    "ask": "temporary",
    "answer": "weights",
    "give": "gradients",
}
"""What the collectives with these tags are about."""
_FREE = frozenset("empty empty_strided empty_like new_empty new_empty_strided".split())
_PICKS = frozenset("embedding index index_select gather own_rows".split())


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


def source_of(node: Node) -> str:
    """``file:line`` of the user's line that made ``node``; "" if it is not known."""
    frames = re.findall(r'File "(?:[^"]*/)?([^"/]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(frames[-1]) if frames else ""


def _family(target: Any) -> str:
    name = target._schema.name
    return "gather" if "gather" in name else "all_reduce" if "all_reduce" in name else "reduce"


def _whole(target: Any, source: Any, out: Any) -> Any:
    """The tensor of all ranks' data that a collective is about."""
    return out if _family(target) == "gather" else source


def _writes(func: Any) -> bool:
    return isinstance(func, OpOverload) and func._schema.is_mutable


def _nbytes(x: torch.Tensor) -> int:
    """Bytes of ``x``, an expanded dimension counted once."""
    numel = 1
    for size, stride in zip(x.shape, x.stride()):
        numel *= 1 if stride == 0 else size
    return int(numel) * x.dtype.itemsize


def _key(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata
