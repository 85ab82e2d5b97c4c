"""What each node of a graph computes, as a number: two nodes with one number have one value.

A number is a hash of an operator and of its inputs' numbers (value numbering), down to the graph's inputs. `verify`
compares a rewritten graph with the graph it was made of, and a backward with its forward, by what they return::

    before                             after
    t = permute(primals_3)   #1        w = as_strided(wait(all_gather(shard)), …)   "h.0.weight"
    y = mm(x, t)             #2        t = permute(w)    #1, because primals_3 is "h.0.weight" too
    return y                           y = mm(x, t)      #2

Five laws are known, those that passes rest on; by all others a node with other inputs has another value:

* a parameter has one number, however it comes: as an input, or as a part of a gathered buffer;
* a cast of a part is a part of the cast;
* widening a float and narrowing it again gives the same float;
* where weights are read from a replica in a narrower dtype, a parameter is what is left of it there;
* ``as_strided`` of a weight counts from where the memory begins that the weight is in.

What draws random numbers has a number per call, in the order of all such calls: they draw from one generator. What an
operator writes to has another number from then on.

``pin_order`` of `lower` hides an operator in a subgraph: `Op` shows what is inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from zerofx._torch import OpOverload, pinned, pytree
from zerofx.model.layout import contiguous_stride
from zerofx.passes import edit
from zerofx.passes.context import Context, Meanings, ParameterRef


@dataclass(frozen=True)
class Op:
    """A node's operation, wherever it stands.

    Attributes:
        node: of the graph.
        target, args, kwargs: as a node's; all nodes in them are of the graph.
        after: what it was told to wait for besides its arguments.
    """

    node: Node
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    after: tuple[Node, ...] = ()

    @staticmethod
    def of(node: Node) -> Op:
        return Op(node, *(pinned(node) or (node.target, node.args, node.kwargs, ())))

    @property
    def inputs(self) -> list[Node]:
        """The nodes among its arguments."""
        if self.target is self.node.target:
            return self.node.all_input_nodes
        return [x for x in pytree.arg_tree_leaves(*self.args, **self.kwargs) if isinstance(x, Node)]

    def times(self, node: Node) -> int:
        """How often ``node`` is among its arguments: ``cat([w, w])`` has it twice."""
        return sum(x is node for x in pytree.arg_tree_leaves(*self.args, **self.kwargs))

    @property
    def value(self) -> Any:
        return self.node.meta.get("val")

    def cast_to(self) -> torch.dtype | None:
        """The dtype, where the operation does nothing but convert to it."""
        if self.target is edit.CAST:
            return self.args[1]
        if self.target is not torch.ops.aten._to_copy.default or self.kwargs.get("dtype") is None:
            return None
        same = {"device": self.args[0].meta["val"].device, "layout": torch.strided}
        others = {k: v for k, v in self.kwargs.items() if k != "dtype" and v is not None}
        return self.kwargs["dtype"] if all(same.get(k) == v for k, v in others.items()) else None

    def written(self) -> list[Node]:
        """What it writes to, by its schema."""
        if not isinstance(self.target, OpOverload) or not self.target._schema.is_mutable:
            return []
        values = []
        for i, argument in enumerate(self.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                values.append(self.args[i] if i < len(self.args) else self.kwargs.get(argument.name))
        return [x for x in pytree.tree_leaves(values) if isinstance(x, Node)]

    def shares_memory(self) -> bool:
        """Whether its value may share memory with an input."""
        return edit.may_alias(self)  # type: ignore[arg-type]  # it looks at the target alone


Number = int


@dataclass(frozen=True)
class Numbering:
    """Gives values their numbers. ``meanings``: what a forward and its backward have in common."""

    meanings: Meanings

    def parameter(self, ref: ParameterRef, ctx: Context) -> Number:
        """Of a parameter where the model's own graph reads it."""
        number = self.stored(ref)
        layout = ref.layout
        if ctx.stage and not ctx.gathers and layout.param_dtype is not None:
            number = self.cast(number, layout.dtype, layout.param_dtype)
            number = self.cast(number, layout.param_dtype, layout.dtype)
        return number

    def stored(self, ref: ParameterRef) -> Number:
        """Of the parameter as its shards have it. Empty ones of a shape are alike: they have no elements."""
        return hash(("parameter", ref.layout.name, ref.slot.name if ref.slot.numel else ref.slot.shape))

    def cast(self, number: Number, source: torch.dtype, to: torch.dtype) -> Number:
        """Of a value converted from ``source``."""
        narrow, dtype = number, source
        while dtype != to and narrow in self.meanings.widened:
            narrow, dtype = self.meanings.widened[narrow]
        if dtype == to:
            return narrow
        cast = hash(("cast", number, to))
        if source.is_floating_point and to.is_floating_point and source.itemsize < to.itemsize:
            self.meanings.widened[cast] = number, source
        return cast

    def casts(self, number: Number, source: torch.dtype, dtypes: Iterable[torch.dtype]) -> Number:
        """Of a value converted from ``source`` to ``dtypes``, one after the other."""
        for to in dtypes:
            number, source = self.cast(number, source, to), to
        return number

    def call(self, target: Callable, *args: Any, **kwargs: Any) -> Number:
        """Of an operator on numbers (as `Numbered`) and constants."""
        return hash((target, _key(args, {}), _key(kwargs, {})))

    def in_numbers(self, number: Number, shape: tuple[int, ...]) -> Number:
        """Of a value whose sizes are symbols, copied in ``shape``."""
        copy = self.call(torch.ops.aten.clone.default, Numbered(number), memory_format=torch.contiguous_format)
        layout = _key((list(shape), list(contiguous_stride(shape)), 0), {})
        return self.call(edit.AS_STRIDED, Numbered(copy), *layout)

    def of(self, op: Op, numbers: dict[Node, Number], calls: Iterator[int], start: int = 0) -> Number:
        """Of an operation whose inputs have ``numbers``; ``calls`` counts those that draw random numbers.

        ``start``: the byte of memory where the weight begins that it looks at, if any.
        """
        to = op.cast_to()
        if to is not None:
            (source,) = op.inputs
            return self.cast(numbers[source], source.meta["val"].dtype, to)
        if op.target in LAWS:
            return LAWS[op.target](self, op, numbers)
        if op.target is edit.AS_STRIDED:
            source, size, stride = op.args[:3]
            begins = edit.strided_from(op)
            if start:
                begins -= start // source.meta["val"].dtype.itemsize
            return self.call(op.target, Numbered(numbers[source]), *_key((size, stride, begins), numbers))
        key: tuple[Any, ...] = (op.target, _key(op.args, numbers), _key(op.kwargs, numbers))
        if isinstance(op.target, OpOverload) and torch.Tag.nondeterministic_seeded in op.target.tags:
            key += (next(calls),)
        return hash(key)


@dataclass(frozen=True)
class Numbered:
    """A number in the place of a node, for `Numbering.call`."""

    number: Number


LAWS: dict[Any, Callable[[Numbering, Op, dict[Node, Number]], Number]] = {}
"""What features know of an operator's value, by operator."""


def _key(value: Any, numbers: dict[Node, Number]) -> Any:
    if isinstance(value, Node):
        return numbers[value]
    if isinstance(value, Numbered):
        return value.number
    if isinstance(value, (list, tuple)):
        return tuple([_key(x, numbers) for x in value])
    if isinstance(value, dict):
        return tuple([(k, _key(v, numbers)) for k, v in sorted(value.items())])
    return repr(value)  # 1, 1.0 and True are not the same; nor do -1 and -2 hash alike


@dataclass
class Original:
    """What the graph was before any pass: the number of each node and of each output, and what it wrote, in order."""

    nodes: dict[str, Number]
    outputs: list[Number | None]
    writes: list[Number]
    inputs: list[str]
    of_weights: frozenset[int]
    """Outputs that may share memory with a parameter."""
    roots: list[ParameterRef | None]
    """Of each output that is a parameter, or views and casts of one: which."""

    @staticmethod
    def read(gm: GraphModule, ctx: Context, numbering: Numbering) -> Original:
        """Read the graph that AOTAutograd made."""
        numbers: dict[Node, Number] = {}
        calls = itertools.count()
        writes: list[Number] = []
        weights: set[Node] = set()
        roots: dict[Any, ParameterRef] = {}
        for node in gm.graph.nodes:
            if node.op == "output":
                break
            if node.op == "placeholder":
                numbers[node] = input_number(node, ctx, numbering)
                if node.name in ctx.parameters:
                    weights.add(node)
                    roots[node] = ctx.parameters[node.name]
            elif node.op == "get_attr":
                numbers[node] = hash(("attribute", node.target))
            else:
                op = Op(node, node.target, node.args, node.kwargs)
                numbers[node] = numbering.of(op, numbers, calls)
                write(op, numbers, writes)
                if op.shares_memory() and not weights.isdisjoint(node.all_input_nodes):
                    weights.add(node)
                if edit.is_view_or_cast(node) and (root := roots.get(edit.sources(node)[0])) is not None:
                    roots[node] = root
        values = edit.output_values(gm.graph)
        of_weights = frozenset(i for i, x in enumerate(values) if isinstance(x, Node) and x in weights)
        outputs = [numbers[x] if isinstance(x, Node) else None for x in values]
        inputs = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        by_name = {node.name: number for node, number in numbers.items()}
        return Original(by_name, outputs, writes, inputs, of_weights, [roots.get(x) for x in values])


def input_number(node: Node, ctx: Context, numbering: Numbering) -> Number:
    """Of what the model's graph gets as an input: what forward saved, a parameter, or something new."""
    if ctx.phase == "backward" and node.name in numbering.meanings.saved:
        return numbering.meanings.saved[node.name]
    if node.name in ctx.parameters:
        return numbering.parameter(ctx.parameters[node.name], ctx)
    return hash(("input", node.name))


def write(op: Op, numbers: dict[Node, Number], writes: list[Number]) -> None:
    """Give what ``op`` writes to a number of its own, and note the write."""
    for target in op.written():
        writes.append(hash(("write", numbers[op.node], numbers[target])))
        numbers[target] = writes[-1]
