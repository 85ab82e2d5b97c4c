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
* the replicas of stages 1 and 2, and shards that replicas update together, are refreshed before the forward that reads
  them first;
* ``.grad`` is None when backward starts, and becomes the reduced gradients. Where they live in a file and a second one
  comes, both come to memory, and the sum leaves it when others need the room (`zerofx.runtime.state.state_file.KEPT`).
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Interpreter, Node

from zerofx import _torch
from zerofx.model.layout import GroupLayout
from zerofx.passes import edit
from zerofx.passes.context import Context, Executor, ParameterRef
from zerofx.passes.kinds import NODE_KINDS, travelling
from zerofx.passes.ops import discard
from zerofx.runtime.optim.moved import Moved
from zerofx.runtime.state import state_file
from zerofx.runtime.state.raw_file import padded
from zerofx.simulate import inductor_code
from zerofx.simulate.asked import ask
from zerofx.simulate.recorder import About, Kind, Phase, Recorder, family_of, nbytes_of, whole_of
from zerofx.simulate.workspace import Workspaces


class Graph(Protocol):
    """A graph that went through the passes, as a rehearsal reads it: a `zerofx.compiler.rewriting.Rewriting`."""

    context: Context
    code: str | None
    pretended: bool
    before: GraphModule

    @property
    def passes(self) -> Sequence[Any]:
        """In order."""

    def after(self, name: str, *, executor: Executor | None = None) -> GraphModule:
        """The graph after the pass of that name, as an executor would have got it."""

    def before_lower(self) -> GraphModule:
        """The graph before `zerofx.passes.lower`."""


class Pair(Protocol):
    """A graph's forward and backward, as far as there are: a `zerofx.compiler.records.GraphRecord`."""

    @property
    def forward(self) -> Graph | None: ...
    @property
    def backward(self) -> Graph | None: ...
    @property
    def backward_step(self) -> Graph | None: ...


def rehearse(
    records: Sequence[Pair],
    probe: bool = False,
    *,
    updates: Mapping[str, Moved] | None = None,
    step_in_backward: bool = False,
) -> list[Phase]:
    """Run forward and backward of ``records`` once on fake tensors; what each graph did, in the order they ran.

    Dimensions that are symbols have the size they had when the graph was captured. ``probe``: kernels of PyTorch run
    once, each by itself, for the memory that they take inside.
    ``updates``: what the optimizer moves through a file, group by group, where backward updates groups; it does so in
    a step with ``step_in_backward``, where there is such a backward.

    Raises:
        RuntimeError: a graph has no backward yet, or its code cannot be run without numbers.
    """
    for i, record in enumerate(records):
        if record.forward is None or _backward(record, step_in_backward) is None:
            raise RuntimeError(
                f"graph {i} of {len(records)} has no backward yet: it is compiled when it first runs. Call "
                "loss.backward() once before zerofx.predict."
            )
    # Made before any tensor of ours is: passes run in the graphs' own fake tensor mode.
    forwards = [_Code(record.forward) for record in records]  # type: ignore[arg-type]
    backwards = [_Code(_backward(record, step_in_backward)) for record in records]  # type: ignore[arg-type]
    recorder = Recorder(Workspaces() if probe else None)
    read: set[str] = set()  # by the graphs so far: the backward of the first of these is the last, and updates it
    for forward, backward in zip(forwards, backwards, strict=True):
        backward.updates = {name: moved for name, moved in (updates or {}).items() if name not in read}
        read |= {ref.layout.name for ref in forward.context.parameters.values()}
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


def rehearse_micro_batches(
    forward: Graph, backwards: Sequence[Graph], workspaces: Workspaces | None = None
) -> list[Phase]:
    """One graph's forward and backward, once for each of ``backwards``, which accumulate gradients.

    These are variants of one graph for `zerofx.no_sync`, or the same one again. Whoever calls them holds what forward
    returns until the next has, and the gradient with which a backward begins. ``workspaces``: as ``probe`` for
    `rehearse`.
    """
    codes = [(_Code(forward), _Code(backward)) for backward in backwards]
    recorder, phases = Recorder(workspaces), []
    step = _Step(recorder, has_caller=True)
    with torch.no_grad(), _torch.fake_mode(), recorder:
        for i, pair in enumerate(codes):
            for name, code, run in zip(("forward", "backward"), pair, (step.forward, step.backward), strict=True):
                with recorder.phase(i, name, code) as phase:
                    run(i, code)
                phases.append(phase)
    if workspaces is not None:
        workspaces.measure()
    return phases


def _backward(record: Pair, step_in_backward: bool = False) -> Graph | None:
    """The variant that a step ran which accumulated nothing."""
    first, second = record.backward, record.backward_step
    return second or first if step_in_backward else first or second


def updated_inside(records: Sequence[Pair], step_in_backward: bool) -> frozenset[str]:
    """The groups that the backwards of such a step update."""
    traces = [trace for record in records if (trace := _backward(record, step_in_backward)) is not None]
    return frozenset(r.layout.name for trace in traces if trace.context.steps for r in trace.context.found.reductions)


_BRINGS: dict[str, Kind] = {
    "all_gather": "weights",
    "reduce_scatter": "gradients",
    "all_reduce": "gradients",
    "sum_replicas": "gradients",
}
"""What the collectives with these tags are about."""


class _Code:
    """One graph as its executor gets it."""

    def __init__(self, trace: Graph) -> None:
        self.text, self.context = trace.code, trace.context
        self.updates: Mapping[str, Moved] = {}
        # What a dry run wrote for Inductor was never generated: the graph as the other executor would get it.
        self.eager = trace.pretended or trace.context.executor == "eager"
        self.gm = trace.after(trace.passes[-1].__name__, executor="eager" if self.eager else None)
        self.inputs: list[Node] = self.gm.graph.find_nodes(op="placeholder")
        outputs = edit.output_values(trace.before.graph)
        self.saved = {i: outputs[i].name for i in self.context.saved if isinstance(outputs[i], Node)}
        layouts = [ref.layout for ref in (*self.context.parameters.values(), *self.context.gradients.values())]
        self.world_size = layouts[0].world_size if layouts else 1
        # Whose a collective is, is told by what it does and how large it is: generated code does not say.
        self.groups: dict[tuple[str, int], deque[About]] = defaultdict(deque)
        tagged = trace.before_lower().graph
        brings = _BRINGS | {kind: NODE_KINDS[kind].counts_as for kind in travelling()}
        for node in edit.tagged(tagged, *brings):
            whole, tag = whole_of(node.target, node.args[0].meta["val"], node.meta["val"]), node.meta["zerofx"]  # type: ignore[union-attr]
            about = About(tag.group, brings[tag.kind], *self._over(node))
            self.groups[family_of(node.target), nbytes_of(whole)].append(about)

    def _over(self, node: Node) -> tuple[int, int]:
        """Over how many ranks a collective runs, and how many of them are in this rank's row of a mesh."""
        context = self.context
        if context.is_of_replicas(node.args):
            return context.replicas, 1
        return ask("over", node, context) or (self.world_size, self.world_size)

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

    def __init__(self, recorder: Recorder, has_caller: bool = False) -> None:
        self.recorder, self.has_caller = recorder, has_caller
        self.returned: list[Any] = []
        self.saved: dict[int, dict[str, torch.Tensor]] = {}
        self.gradients: list[torch.Tensor] = []
        self.has_gradient: set[Any] = set()
        self.kept: dict[Any, torch.Tensor] = {}
        self.refreshed: set[Any] = set()
        self.sums: dict[GroupLayout, torch.Tensor] = {}  # of a file's gradients, in memory, the longest unused first

    def forward(self, i: int, code: _Code) -> None:
        inputs, layouts = [self._input(node) for node in code.inputs], code.context.found.shards
        between = ask("refreshes", code.context)
        if code.context.stage in (1, 2) or between:
            for layout, replica in zip(layouts, inputs[len(inputs) - len(layouts) :], strict=True):
                if layout not in self.refreshed and layout.requires_grad and (layout.world_size > 1 or between):
                    ranks = between or layout.world_size
                    about = About(layout.name, "weights", ranks, 1 if between else ranks)
                    sent = ask("sent", code.context, layout, replica, ranks, bool(between))
                    self.recorder.refresh(replica, about, sent or nbytes_of(replica))
                self.refreshed.add(layout)
        outputs = code.run(self.recorder, inputs)
        self.saved[i] = {name: outputs[k] for k, name in code.saved.items() if isinstance(outputs[k], torch.Tensor)}
        for value in self.saved[i].values():
            self.recorder.classify(value, "activations")
        if self.has_caller:
            self.returned = outputs[: min(code.context.saved, default=len(outputs))]

    def backward(self, i: int, code: _Code) -> None:
        saved = self.saved.pop(i)
        inputs, kept = [], iter(code.context.found.kept)
        begins_with: list[torch.Tensor] = []  # the caller's: not freed before the end
        for node in code.inputs:
            name, tag = node.name, node.meta.get("zerofx")
            if tag is not None and tag.kind in ("gathered", "secondary"):
                name = code.context.handover.kept_gathered[tag.group].saved
            if name in saved:
                inputs.append(saved.pop(name))
            elif tag is not None and tag.kind == "kept" and (at := next(kept)) in self.kept:
                inputs.append(self.kept.pop(at))
            else:
                inputs.append(self._input(node))
                if node.name.startswith("tangents"):
                    self.recorder.allocate(inputs[-1])
                    if self.has_caller and inputs[-1].numel() == 1:
                        begins_with.append(inputs[-1])
        saved.clear()
        reductions, leaving = code.context.found.reductions, ask("leaves", code.context) or frozenset()
        outputs = code.run(self.recorder, inputs)
        for reduction, gradient in zip(reductions, outputs[len(outputs) - len(reductions) :], strict=True):
            self.recorder.classify(gradient, "gradients", whatever=True)
            if code.context.sync == "keep":
                self._keep(ParameterRef(reduction.layout, reduction.slots[0]), gradient)
                continue
            slots = {(reduction.layout, slot) for slot in reduction.slots}
            if reduction.layout.name in leaving and not code.context.steps:
                self._add_in_file(reduction.layout, slots)
            elif slots - self.has_gradient:  # else it is added to what is there
                self.gradients.append(gradient)
            self.has_gradient |= slots

    def _add_in_file(self, layout: GroupLayout, slots: set[Any]) -> None:
        """As `zerofx.runtime.state.gradients.Gradients.accumulate` does with a gradient that has left."""
        recorder, nbytes = self.recorder, layout.shard_numel * layout.dtype.itemsize
        if not slots & self.has_gradient:
            recorder.give_back(nbytes)  # views of it are made
            return
        new, before = self._room(layout, nbytes), self.sums.pop(layout, None)
        read = padded(nbytes)
        if before is None:
            before, read = self._room(layout, nbytes, beside=nbytes), 2 * read
        recorder.arrived("add", layout.name, recorder.transfer("add", layout.name, read=read))
        self.sums[layout] = before
        del new

    def _room(self, layout: GroupLayout, nbytes: int, beside: int = 0) -> torch.Tensor:
        """Memory for what the file has, in the place of sums that were not used for the longest time."""
        kept = [(other, nbytes_of(x), other == layout) for other, x in self.sums.items()]
        for other in state_file.leaving(kept, nbytes + beside):
            number = self.recorder.transfer("sum", other.name, written=nbytes_of(self.sums.pop(other)))
            self.recorder.arrived("sum", other.name, number)
        with self.recorder.unseen():
            made = torch.empty(layout.shard_numel, dtype=layout.dtype)
        self.recorder.allocate(made)
        self.recorder.classify(made, "gradients")
        return made

    def _keep(self, parameter: ParameterRef, gradient: torch.Tensor) -> None:
        """As `zerofx.runtime.state.gradients.Gradients.keep` does."""
        if parameter in self.kept:
            self.kept[parameter] = self.kept[parameter] + gradient
            self.recorder.classify(self.kept[parameter], "gradients", whatever=True)
        else:
            self.kept[parameter] = gradient

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
        found = _torch.followed(target, args, kwargs)
        return super().call_function(target, args, kwargs) if found is NotImplemented else found


def source_of(node: Node) -> str:
    """``file:line`` of the user's line that made ``node``; "" if it is not known."""
    frames = re.findall(r'File "(?:[^"]*/)?([^"/]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(frames[-1]) if frames else ""
