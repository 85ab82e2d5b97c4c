"""What zerofx asks of AOTAutograd's partitioner: what forward saves under one budget or another (2.11, 2.13, 2.15).

The partitioner takes ``activation_memory_budget``, a fraction. It lets a knapsack choose what may be recomputed, and a
minimum cut decide what is saved then. Three things about that fraction are not what a budget for activations needs:

* it counts inputs, and parameters are inputs. Where weights are more than activations it does nothing;
* it is a fraction of what the knapsack is given. What the cut saves can be more or less;
* 0 skips the cut, and with it every mark that something must be saved. Random numbers are drawn anew then.

So a `Cut` leaves inputs out of what the partitioner counts, and is asked for one fraction after another.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

LEAST = 1e-9
"""The smallest fraction: the knapsack keeps nothing, and the cut is made."""


class Cut:
    """What PyTorch's partitioner would save of one joint graph; it has not been cut yet.

    Attributes:
        graph: the joint graph.
        inputs: of forward: parameters, buffers, the batch. They are there anyway.
        forward: the nodes that forward computes, in order.
    """

    def __init__(
        self, choose: Callable[..., list[Node]], graph: Graph, info: Any, cost: Callable[[Node], float]
    ) -> None:
        self.graph, self._choose, self._cost = graph, choose, cost
        # Whoever called forward has its inputs: to save one takes no memory.
        free = type(info.static_lifetime_input_nodes)(info.inputs)
        self._info = replace(info, inputs=[], static_lifetime_input_nodes=free)
        self._solved: dict[Any, tuple[list[Node], Any]] = {}
        self._costs: dict[Node, float] = {}
        self.inputs: frozenset[Node] = frozenset(info.inputs)
        self.forward: list[Node] = sorted(info.required_fw_nodes, key=info.get_fw_order)

    def saved(self, fraction: float) -> list[Node]:
        """What forward saves if the partitioner is given ``fraction``: more than 0, and 1 where there is no budget."""
        import torch._functorch.config
        from torch._functorch import partitioners
        from torch._inductor.custom_graph_pass import CustomRuntimeEstimator

        theirs, last = partitioners.solve_min_cut, None

        class Estimator(CustomRuntimeEstimator):
            def __call__(_, node: Node) -> float:
                return self._costs.setdefault(node, self._cost(node))

            def uuid(_) -> Any:
                return "zerofx"

        def solve(graph: Graph, info: Any, options: Any, dont_ban: Any = ()) -> tuple[list[Node], Any]:
            nonlocal last
            key = astuple(options), frozenset(dont_ban or ())
            if key not in self._solved:
                self._solved[key] = theirs(graph, info, options, dont_ban)
            last, banned = self._solved[key]
            return [n for n in last if n not in self.inputs], type(banned)(n for n in banned if n not in self.inputs)

        with (
            unittest.mock.patch.object(partitioners, "solve_min_cut", solve),
            torch._functorch.config.patch(
                activation_memory_budget_runtime_estimator=Estimator(), activation_memory_budget_solver="dp"
            ),
        ):
            self._choose(self.graph, self._info, fraction)
        assert last is not None, "every answer is a cut"
        return last

    def marked(self) -> None:
        """Nodes have been marked to be saved: what was answered before does not hold any more."""
        self._solved.clear()

    def recomputed(self, saved: Sequence[Node]) -> list[Node]:
        """What backward computes once more if forward saves ``saved``, in forward's order."""
        there, ours = self.inputs.union(saved), set(self.forward)
        late = (node for node in self.graph.nodes if node not in ours and node not in there)
        todo = [x for node in late for x in node.all_input_nodes]
        found: set[Node] = set()
        while todo:
            node = todo.pop()
            if node in ours and node not in there and node not in found:
                found.add(node)
                todo += node.all_input_nodes
        return [node for node in self.forward if node in found and node.op == "call_function"]

    def has_checkpoints(self) -> bool:
        """Whether `torch.utils.checkpoint` has marked nodes of forward that are to be recomputed."""
        from torch._functorch.partitioners import must_recompute

        return any(map(must_recompute, self.forward))

    def read_by_backward(self) -> list[Node]:
        """What forward saves without a partitioner that recomputes: all of its own that backward reads."""
        ours, found = set(self.forward), []
        for node in self.forward:
            late = [user for user in node.users if user not in ours]
            if late and isinstance(node.meta.get("val"), (tuple, list)):  # of several results, those that are read
                found += late
            elif late:
                found.append(node)
        return found


@contextlib.contextmanager
def saving(choose: Callable[[Cut], Sequence[Node]], cost: Callable[[Node], float]) -> Iterator[None]:
    """Graphs that are cut inside save what ``choose`` says. ``cost`` of computing a node once more, in any unit."""
    from torch._functorch import partitioners

    theirs = partitioners.choose_saved_values_set

    def chosen(joint_graph: Graph, node_info: Any, memory_budget: float = 1) -> list[Node]:
        return list(choose(Cut(theirs, joint_graph, node_info, cost)))

    with unittest.mock.patch.object(partitioners, "choose_saved_values_set", chosen):
        yield


@contextlib.contextmanager
def saving_as(rule: Callable[[Graph, Sequence[Node]], Sequence[Node]]) -> Iterator[None]:
    """Of graphs that are cut inside forward saves what ``rule`` makes of the joint graph and of what it would save."""
    from torch._functorch import partitioners

    theirs = partitioners.choose_saved_values_set

    def chosen(joint_graph: Graph, node_info: Any, memory_budget: float = 1) -> list[Node]:
        return list(rule(joint_graph, theirs(joint_graph, node_info, memory_budget)))

    with unittest.mock.patch.object(partitioners, "choose_saved_values_set", chosen):
        yield


Partition = Callable[[GraphModule, Callable[[Cut], Sequence[Node]]], tuple[GraphModule, GraphModule]]
"""From a joint graph, and what says what its forward saves, to forward and backward. The joint graph is changed."""


@contextlib.contextmanager
def partitioning(
    around: Callable[[GraphModule, Partition], tuple[GraphModule, GraphModule]], cost: Callable[[Node], float]
) -> Iterator[None]:
    """Inside, joint graphs go to ``around`` with what cuts them, so that it can try copies (2.11, 2.13, 2.15)."""
    import torch._inductor.compile_fx
    from torch._functorch import partitioners

    theirs = partitioners.min_cut_rematerialization_partition

    def partition(joint: GraphModule, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        def cut(gm: GraphModule, choose: Callable[[Cut], Sequence[Node]]) -> tuple[GraphModule, GraphModule]:
            descs = gm.graph.output_node().meta.get("desc")
            with saving(choose, cost):
                forward, backward = theirs(gm, *args, **kwargs)
            _describe(forward.graph.output_node(), descs, kwargs["num_fwd_outputs"])
            return forward, backward

        return around(joint, cut)

    name = "min_cut_rematerialization_partition"
    with (
        unittest.mock.patch.object(partitioners, name, partition),
        unittest.mock.patch.object(torch._inductor.compile_fx, name, partition),
    ):
        yield


def _describe(output: Node, joint: Sequence[Any] | None, returned: int) -> None:
    """Say again what each output of a forward is, where the partitioner dropped it (2.11, 2.13, 2.15).

    It does so where it saves the state of a random number generator. AOTAutograd knows only after the cut how many
    outputs its caller gets. ``joint``: what it said of the joint graph's outputs, of which the first are ``returned``.
    """
    from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

    if joint is not None and "desc" not in output.meta:
        saved = range(len(output.args[0]) - returned)  # type: ignore[arg-type]
        output.meta["desc"] = [*joint[:returned], *map(SavedForBackwardsAOTOutput, saved)]


@contextlib.contextmanager
def without_code() -> Iterator[None]:
    """Graphs that change inside get no Python function: nobody is going to call one (2.11, 2.13, 2.15)."""
    with unittest.mock.patch.object(GraphModule, "recompile", lambda gm: None):
        yield


def return_first_meshes(joint: GraphModule) -> None:
    """Make ``joint`` return a mesh as the input in which it came first (2.13, 2.15).

    A `DTensor` result is its part and its mesh, and ``primals_2`` and ``tangents_2`` can be equal, yet two objects::

        return (part, tangents_2)   ->   return (part, primals_2)

    PyTorch looks up which input a returned mesh is by the object. `DTensor` caches what an operator's result is like by
    equal arguments, so the object may be of an older mesh, and then the tangents alone have it. Forward has none of
    these, and the graph could not be cut. Equal meshes are the same ranks: one may stand for the other. On 2.11 a mesh
    is no input.
    """
    from torch._library.fake_class_registry import FakeScriptObject

    inputs = [x for x in joint.graph.find_nodes(op="placeholder") if isinstance(x.meta.get("val"), FakeScriptObject)]

    def first(node: Node) -> Node:
        if node not in inputs:
            return node
        return next(x for x in inputs if x.meta["val"].real_obj == node.meta["val"].real_obj)

    if inputs:
        output = joint.graph.output_node()
        output.args = map_arg(output.args, first)


def cutting(
    on_joint: Callable[[GraphModule], Any] | None, *, recomputes: bool
) -> Callable[..., tuple[GraphModule, GraphModule]]:
    """A partitioner for AOTAutograd without Inductor; ``on_joint`` gets the joint graph first.

    ``recomputes``: the one that can; else AOTAutograd's own, which saves what backward reads.
    """
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

    chosen = min_cut_rematerialization_partition if recomputes else default_partition

    def partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        return_first_meshes(joint)
        if on_joint is not None:
            on_joint(joint)
        return chosen(joint, inputs, **kwargs)

    return partition
