"""Small tools that every pass uses to edit a graph."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from zerofx._torch import OpOverload, computes_anew, is_tangent, pytree, without_symbols
from zerofx.passes.context import Context, Tag
from zerofx.passes.travel import communicates


def insert(
    graph: Graph, target: Callable[..., Any], args: tuple[Any, ...], *, tag: Tag, near: Node, **kwargs: Any
) -> Node:
    """Insert a call at the graph's current insertion point, tagged, with its fake value and ``near``'s stack trace.

    ``near`` is the node of the user's model that the new node serves: who reads the graph finds the user's line.
    """
    node = graph.call_function(target, args, kwargs)
    node.meta["zerofx"] = tag
    for key in ("stack_trace", "nn_module_stack"):
        if key in near.meta:
            node.meta[key] = near.meta[key]
    fake_args, fake_kwargs = values((args, kwargs))
    node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def values(arguments: Any) -> Any:
    """``arguments``, any nesting of containers, with its fake value in the place of each node."""
    return map_arg(arguments, lambda n: n.meta.get("val"))


def tagged(graph: Graph, *kinds: str) -> list[Node]:
    """The nodes that zerofx inserted with one of ``kinds``, in graph order."""
    return [n for n in graph.nodes if is_kind(n, *kinds)]


def is_kind(node: Node, *kinds: str) -> bool:
    """Whether zerofx inserted the node, with one of ``kinds``."""
    return "zerofx" in node.meta and node.meta["zerofx"].kind in kinds


def by_group(nodes: Iterable[Node]) -> dict[str, list[Node]]:
    """Nodes that zerofx inserted, by the name of the group that they serve."""
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        groups.setdefault(node.meta["zerofx"].group, []).append(node)
    return groups


def positions(graph: Graph) -> dict[Node, int]:
    """Each node's place in the graph. Stale after the next insertion."""
    return {node: i for i, node in enumerate(graph.nodes)}


def output_values(graph: Graph) -> list[Any]:
    """What the graph returns, as a flat list (AOTAutograd's graphs return a flat tuple)."""
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def set_output_values(graph: Graph, values: Iterable[Any]) -> None:
    """Replace what the graph returns."""
    graph.output_node().args = (tuple(values),)


def publish(gm: GraphModule, ctx: Context, name: str, node: Node) -> None:
    """Hand ``node`` to the user at every run, as ``zerofx.published(model)[name]``; for a user's pass.

    It becomes one more output of the graph. Nobody waits for it: on a GPU it is there when the stream has come to it.
    """
    if name in ctx.found.published:
        raise ValueError(f"{name!r} is published twice in one graph ({ctx.name}): give one of them another name.")
    values = output_values(gm.graph)
    place = len(values) - len(ctx.found.reductions)
    set_output_values(gm.graph, [*values[:place], node, *values[place:]])
    ctx.found.published.append(name)


def module_of(node: Node) -> str:
    """The name of the module whose code made ``node``, as in ``named_modules``; empty where it is not known.

    A node of a backward graph has that of the node of forward that it belongs to.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str(next(reversed(list(stack.values())), ("", None))[0])  # "L['self'].blocks.0", as Dynamo calls it
    parts = re.findall(r"\w+", re.sub(r"^[LG]\['\w+'\]|\b(__self__|_modules|_orig_mod)\b", "", path))
    return ".".join(parts)


def last_placeholder(graph: Graph) -> Node | None:
    """The last of the graph's inputs. AOTAutograd makes tokens of effects (`linalg.solve`) ahead of them."""
    found = None
    for node in graph.nodes:
        if node.op == "placeholder":
            found = node
        elif node.target is not torch.ops.prims._make_token.default:
            break
    return found


def after_inputs(node: Node) -> Node:
    """Where to insert what reads ``node``: after it, and after all inputs of the graph."""
    if node.op != "placeholder":
        return node
    last = last_placeholder(node.graph)
    assert last is not None
    return last


def placeholder(graph: Graph, name: str, value: Any, tag: Tag, last: Node | None = None) -> Node:
    """A new last input of the graph. ``last``: the one before it, for callers who know and add many."""
    last = last or last_placeholder(graph)
    with graph.inserting_after(last) if last is not None else graph.inserting_before(next(iter(graph.nodes))):
        node = graph.placeholder(re.sub(r"\W", "_", name))
    node.target = node.name  # unlike the target, the graph made it unique
    node.meta |= {"zerofx": tag, "val": value}
    return node


def finish(gm: GraphModule, edits: int) -> int:
    """Check and recompile an edited graph; what every pass ends with."""
    if edits:
        gm.graph.lint()
        gm.recompile()
    return edits


CAST = torch.ops.prims.convert_element_type.default
"""``CAST(x, dtype)``: what both executors take (Inductor has no kernel for ``aten._to_copy``)."""

AS_STRIDED = torch.ops.aten.as_strided.default


def is_cast(node: Node, dtype: torch.dtype | None = None) -> bool:
    """Whether the node only converts its input to another dtype (to ``dtype``)."""
    if node.target is _aten._to_copy.default:
        device = node.all_input_nodes[0].meta["val"].device
        same = all(
            v is None or v == {"device": device, "layout": torch.strided}.get(k)
            for k, v in node.kwargs.items()
            if k != "dtype"
        )
        cast = same and node.kwargs.get("dtype") is not None
    else:
        cast = node.target is CAST
    return cast and (dtype is None or node.meta["val"].dtype == dtype)


def is_view_or_cast(node: Node) -> bool:
    """Whether the node only looks at its one tensor input another way, or in another dtype."""
    return node.op == "call_function" and views_or_casts(node.target) and len(sources(node)) == 1


@functools.cache
def views_or_casts(target: Any) -> bool:
    """Whether an operator only looks at a tensor another way, or in another dtype, or copies what it sees.

    Views follow from the operators' schemas: what they return shares memory with an argument, and they write nothing.
    """
    if not isinstance(target, OpOverload):
        return target is operator.getitem  # of a split
    declared = not target._schema.is_mutable and any(r.alias_info is not None for r in target._schema.returns)
    return declared or torch.Tag.view_copy in target.tags or target in _UNDECLARED_VIEWS or target in _CASTS_AND_COPIES


def strided_from(node: Any) -> Any:
    """The element of memory that an `AS_STRIDED` begins with: it counts from where the memory begins."""
    given = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    return node.args[0].meta["val"].storage_offset() if given is None else given


def sources(node: Node) -> list[Node]:
    """The inputs of a node, but for sizes."""
    return [x for x in node.all_input_nodes if not isinstance(x.meta.get("val"), (int, torch.SymInt))]


def aliases(node: Node) -> list[Node]:
    """``node`` and every node whose value may share its memory, found through the operators' schemas.

    What has no schema (``getitem``, most higher-order operators) is taken to share memory.
    """
    found, todo = {node: None}, [node]
    while todo:
        for user in todo.pop().users:
            if user not in found and user.op != "output" and may_alias(user):
                found[user] = None
                todo.append(user)
    return list(found)


def hinted_nbytes(value: torch.Tensor) -> int:
    """Bytes of a fake tensor's elements; dimensions that are symbols as they were when it was captured."""
    numel: int = math.prod(without_symbols(tuple(value.shape)))
    return numel * value.dtype.itemsize


def behind_tangents(graph: Graph) -> set[Node]:
    """What can be computed in backward only: the tangents of a joint graph, and all that follows from them."""
    late: set[Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late


def escapes(node: Node) -> bool:
    """Whether the graph returns the node or anything that may share its memory."""
    return any(user.op == "output" for alias in aliases(node) for user in alias.users)


def may_alias(node: Node) -> bool:
    """Whether the node's value may share memory with one of its inputs."""
    if not isinstance(node.target, OpOverload):
        return not computes_anew(node.target)
    returns_alias = any(r.alias_info is not None for r in node.target._schema.returns)
    return returns_alias or node.target in _UNDECLARED_VIEWS


def written_by(node: Node) -> list[Node]:
    """The nodes that an operator writes to, by its schema."""
    written = []
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    for i, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            written += [n for n in pytree.tree_leaves(value) if isinstance(n, Node)]
    return written


def draws(node: Node) -> bool:
    """Whether an operator draws random numbers, by the device's generator."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for i, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0)
    return True


def last_use(node: Node, order: dict[Node, int]) -> Node | None:
    """The last node that reads ``node``'s memory, itself or through a view; None where it leaves the graph."""
    if escapes(node):
        return None
    readers = [user for alias in aliases(node) for user in alias.users]
    return max(readers, key=order.__getitem__, default=node)


_aten = torch.ops.aten
_UNDECLARED_VIEWS = frozenset(
    {_aten._unsafe_view.default, _aten._reshape_alias.default, _aten.reshape.default, _aten.contiguous.default}
)
_CASTS_AND_COPIES = frozenset(
    {
        CAST,
        _aten._to_copy.default,
        _aten.clone.default,
        _aten._conj_physical.default,
        _aten.conj_physical.default,
    }
)


def is_kernel(node: Node) -> bool:
    """Whether Inductor runs the node as a kernel of its own, rather than inside of those that read it."""
    name = node.target._schema.name if isinstance(node.target, OpOverload) else ""
    return (
        communicates(node.target)
        or name.startswith(("_c10d_functional", "zerofx"))
        or any(part in name for part in _KERNELS)
    )


_KERNELS = ("::mm", "::addmm", "::bmm", "::baddbmm", "::convolution", "scaled_dot_product", "attention")
