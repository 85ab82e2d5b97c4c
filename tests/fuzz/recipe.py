"""A recipe: one fuzz case as plain data. Any recipe is valid, so that a failing one can be cut down freely.

A net takes ``x`` (rows, LENGTH, WIDTH) and ``tokens`` (rows, LENGTH), and hands a tensor of three dimensions from layer
to layer. Where two widths must agree (residuals, branches, shared weights) the tensor is cut or padded with zeros.

    leaf kinds         what they add to the tensor's way
    -----------------  -------------------------------------------------------------------------------------------
    linear, strided    a matrix and tanh; ``strided``: the weight is a transposed view
    single             the same in float32, in a model that is float64
    norm, batch_norm   normalisations; the second has buffers
    conv               over positions
    channels_last      the same with weight and input in that memory format
    gru, lstm, rnn     over positions; Dynamo does not trace them
    attention          nn.MultiheadAttention, one head
    embedding, bag     + a row per token; + one for all tokens
    positions          + a bare parameter, sliced
    scalar, scale      * a parameter of no dimensions; of one
    empty              + the sum of a parameter without elements
    custom, stash      a torch.autograd.Function with a weight; ``stash``: not by ``save_for_backward``
    function           the same in the newer style (``setup_context``), with a matrix
    complex            * a complex view of a parameter, among frequencies
    weight_norm,       matrices that are computed at each use; the second has buffers that change
    spectral_norm
    vmap               a matrix under ``torch.vmap``
    cond               ``torch.cond``: a matrix in each branch, and data decide
    sometimes          a matrix that only some calls use
    unused             a matrix that no call uses
    tied, transposed   an earlier layer's weight under a second name, as it is or transposed
    again              an earlier layer, called once more
    peek               an earlier layer's weight, read by code that is not compiled
    break, count       a graph break; a buffer that counts calls
    stop               half of the gradient

    containers         residual, branch (sum of its children), sequence (numbered children),
                       checkpoint, reentrant (both kinds of torch.utils.checkpoint),
                       eager (torch.compiler.disable), no_grad
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

LENGTH, WIDTH, VOCAB = 3, 5, 61

CONTAINERS = ("residual", "branch", "sequence", "checkpoint", "reentrant", "eager", "no_grad")
SHARERS = ("tied", "transposed", "again", "peek")
LEAVES = (
    *("linear", "strided", "single", "norm", "batch_norm", "conv", "gru", "attention", "embedding", "positions"),
    *("scalar", "scale", "empty", "custom", "stash", "sometimes", "unused", *SHARERS, "break", "count", "stop"),
    *("channels_last", "lstm", "rnn", "bag", "function", "complex", "weight_norm", "spectral_norm", "vmap", "cond"),
)
UNCOMPILED = {"break", "eager", "checkpoint", "reentrant", "no_grad", "peek", "gru", "lstm", "rnn"}
"""What ends a graph, or may run outside of any."""
COUNTERS = ("count", "spectral_norm")
"""What comes of them depends on how often they ran: a checkpoint, which runs them again, would change it."""
COMPILED = ("vmap", "cond")
"""What is refused outside of any graph, or some of it."""

# What a training loop does between two optimizer steps, one name after another.
CALLS = (
    "plain",  # forward, backward
    "keep",  # the same under no_sync
    "sometimes",  # a call that uses the layers of that kind
    "two_forwards",  # two forwards, one backward of the sum
    "crossed",  # two forwards, two backwards, the first forward's last
    "eval",  # a forward without gradients
    "dropped",  # a forward whose backward never comes
    "longer",  # more rows than usual
    "uneven",  # more rows on rank 0 alone
    "branches",  # rank 0 alone uses the layers "sometimes", where that is not another collective; else all ranks
    "fewer",  # as "keep", by turns on rank 0 alone
)


# What happens to the weights between two steps, without gradients.
WRITES = (
    "none",
    "rows",  # two rows are set
    "fill",  # the same by ``index_fill_``
    "mask",  # some elements become zero, and stay so for a step
    "zero",  # the first row does
    "copy",  # the last row becomes the first
)
RELOADS = (
    "none",
    "own",  # the module's state dict is loaded into the module
    "whole",  # the same, of whole tensors
    "twin",  # it is loaded into another module of the class, the weights are lost, and it comes back from there
)


def brief(self: Any) -> str:
    """As one would write it: without what is as by default."""
    given = [(f.name, getattr(self, f.name)) for f in fields(self)]
    said = [f"{name}={value!r}" for name, value in given if value != getattr(type(self), name, None)]
    return f"{type(self).__name__}({', '.join(said)})"


@dataclass(frozen=True, repr=False)
class Layer:
    """One layer. ``width``: of its output; ``of``: which earlier layer a sharer shares with, counted modulo."""

    kind: str
    width: int = WIDTH
    bias: bool = True
    frozen: bool = False
    of: int = 0
    children: tuple[Layer, ...] = ()
    __repr__ = brief


@dataclass(frozen=True, repr=False)
class Recipe:
    """One case.

    Attributes:
        layers: the net.
        steps: for each optimizer step, the calls that lead to it.
        stage, world, executor: see ``zerofx.compile``; ``world`` is the number of ranks.
        rows: of the mesh that the ranks are, where they divide by it: replicas of the model; 1: there is no mesh.
        scheme: on a mesh: "shard", "between" (replicas share the optimizer's work), "near" (backward gathers in a row),
            "all" (one dimension). The two in the middle are for stage 3; in others they are the first.
        grouping: "merged" (all in one), "each" (what automatic grouping finds), "split" (cut at a few bytes),
            "linear" (module classes), "rule" (a function of the name).
        lookups: stage 3 in which rows of tables travel; not where ranks have batches of two shapes.
        one_copy: stage 3 with weights that the ranks have in common.
        wire: stages 1 to 3, what travels in codes, on a mesh between its rows: "none", "small" (nothing, as all are as
            small as those that travel as they are), "bf16", "fp8", "int8", "int4" (weights in int8), "feedback" (the
            same, with error feedback).
        budget: of gathered bytes: "none", "inf", or "some" (two thirds of the model).
        precision: "full", "low" (weights and gradients in float32), "reduce" (gradients in float32).
        turns: ranks may run other graphs, or fewer (``uneven=True``).
        buckets: of stage 0.
        optimizer: "sgd" (with momentum), "adamw", "before" (adamw, made before the model is sharded).
        inside: the last backward of a step does the step (`zerofx.step_in_backward`); not where gradients are clipped.
        clip: clip gradients by norm.
        penalty: the loss has a term that reads weights outside of any graph.
        output: what the net returns: "loss", "tuple", "dict", "shared" (one tensor in several places, and views of it).
        writes: of `WRITES`, after each step.
        reload: of `RELOADS`, after each step.
        thaw: in every second step what is frozen is trained.
        zero: whether zero_grad sets gradients to None.
        seed: of weights and data.
    """

    layers: tuple[Layer, ...]
    steps: tuple[tuple[str, ...], ...] = (("plain",), ("plain",))
    stage: int = 3
    world: int = 2
    executor: str = "eager"
    rows: int = 1
    scheme: str = "shard"
    grouping: str = "each"
    lookups: bool = False
    one_copy: bool = False
    wire: str = "none"
    budget: str = "none"
    precision: str = "full"
    turns: bool = False
    buckets: str = "group"
    optimizer: str = "sgd"
    inside: bool = False
    clip: bool = False
    penalty: bool = False
    output: str = "loss"
    writes: str = "none"
    reload: str = "none"
    thaw: bool = False
    zero: bool = True
    seed: int = 0
    __repr__ = brief

    @property
    def branches(self) -> bool:
        """Whether ranks may differ in whether they use the layers "sometimes": one group has them, in one graph.

        What is not compiled, and in stage 0 a bucket for each parameter, has collectives of each layer's own.
        """
        if self.by_turns:
            return True
        alone = self.penalty or (self.stage == 0 and self.buckets == "parameter")
        return self.grouping == "merged" and not alone and not (UNCOMPILED & kinds(self.layers) or _frozen(self.layers))

    def uses_sometimes(self, call: str, rank: int) -> bool:
        """Whether a rank uses the layers "sometimes" in a call."""
        return call == "sometimes" or (call == "branches" and (rank == 0 or not self.branches))

    @property
    def by_turns(self) -> bool:
        """Whether it runs by turns: not with what is refused then."""
        refused = self.lookups or self.one_copy or self.inside or self.wire != "none" or self.rows > 1
        return self.turns and not refused

    @property
    def scheme_of_mesh(self) -> str:
        """The scheme that it is run with; "" where there is no mesh."""
        if self.rows == 1 or self.world % self.rows:
            return ""
        return self.scheme if self.stage == 3 or self.scheme == "all" else "shard"


def _frozen(layers: tuple[Layer, ...]) -> bool:
    return any(layer.frozen or _frozen(layer.children) for layer in layers)


def kinds(layers: tuple[Layer, ...]) -> set[str]:
    """The kinds that occur anywhere in ``layers``."""
    return {layer.kind for layer in layers}.union(*(kinds(layer.children) for layer in layers))
