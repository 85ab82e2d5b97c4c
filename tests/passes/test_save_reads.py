"""save_reads: what was read of an input before forward wrote to it is saved, never read once more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

import zerofx
from tests.passes.graphs import Sketch, aten
from tests.slow import quick_if
from tests.workers import Workers
from zerofx.passes import save_reads


def marked(gm: GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]


def joint(read: Callable[[Sketch, Node], Node], *, write: bool = True, late: bool = False) -> Sketch:
    """``y = x * read(calls)``, its gradient, and a write to ``calls``, ``late`` in backward, at the end."""
    s = Sketch()
    x, calls, dy = s.input("x", 4), s.input("calls", 4), s.input("tangents_1", 4)
    factor = read(s, calls)
    y = s.call(aten.mul.Tensor, x, factor)
    dx = s.call(aten.mul.Tensor, dy, factor)
    news = s.call(aten.add.Tensor, calls, dy) if late else s.call(aten.mul.Tensor, x, 2.0)
    if write:
        s.call(aten.copy_.default, calls, news)
    s.done(y, dx)
    return s


def finished(s: Sketch) -> GraphModule:
    return GraphModule(torch.nn.Module(), s.graph)


def plus_one(s: Sketch, calls: Node) -> Node:
    return s.call(aten.add.Tensor, calls, 1.0)


def test_a_reader_of_what_is_written_is_to_be_saved() -> None:
    gm = finished(joint(plus_one))
    assert save_reads(gm) == 1
    assert marked(gm) == ["add"]


def test_reads_through_views_count_and_views_are_not_saved() -> None:
    gm = finished(joint(lambda s, calls: plus_one(s, s.call(aten.view.default, calls, [4]))))
    assert save_reads(gm) == 1
    assert marked(gm) == ["add"]


def test_a_cast_is_a_read() -> None:
    gm = finished(joint(lambda s, calls: s.call(aten._to_copy.default, calls, dtype=torch.float64)))
    assert save_reads(gm) == 1
    assert marked(gm) == ["_to_copy"]


def test_a_write_through_a_view_is_a_write() -> None:
    s = Sketch()
    x, calls, dy = s.input("x", 2), s.input("calls", 4), s.input("tangents_1", 2)
    head = s.call(aten.slice.Tensor, calls, 0, 0, 2)
    factor = s.call(aten.exp.default, head)
    y, dx = s.call(aten.mul.Tensor, x, factor), s.call(aten.mul.Tensor, dy, factor)
    s.call(aten.copy_.default, head, x)
    gm, _ = s.done(y, dx)
    assert save_reads(gm) == 1
    assert marked(gm) == ["exp"]


def test_without_a_write_in_forward_the_partitioner_is_free() -> None:
    for graph in (joint(plus_one, write=False), joint(plus_one, late=True)):
        gm = finished(graph)
        assert save_reads(gm) == 0
        assert marked(gm) == []


def queue(*looks: Callable[[Sketch, Node], Node]) -> GraphModule:
    """``y = x @ look(keys)`` for each; backward reads the same views; forward writes to ``keys``."""
    s = Sketch()
    x, keys, dy = s.input("x", 4, 4), s.input("keys", 8, 4), s.input("tangents_1", 4, 4)
    views = [look(s, keys) for look in looks]
    ys = [s.call(aten.mm.default, x, view) for view in views]
    dxs = [s.call(aten.mm.default, dy, s.call(aten.permute.default, view, [1, 0])) for view in views]
    s.call(aten.slice.Tensor, keys, 0, 4, 8)  # read by nobody, as functionalisation leaves some
    s.call(aten.copy_.default, keys, s.call(aten.cat.default, [x, x]))
    gm, _ = s.done(keys, *ys, *dxs)
    return gm


def rows(first: int) -> Callable[[Sketch, Node], Node]:
    return lambda s, keys: s.call(aten.slice.Tensor, keys, 0, first, first + 4)


def test_what_backward_reads_itself_is_copied_for_forward_too() -> None:
    gm = queue(rows(0), rows(4))
    assert save_reads(gm) == 1
    assert marked(gm) == ["clone_default"]
    nodes = {node.name: node for node in gm.graph.nodes}
    assert {user.name for user in nodes["clone_default"].users} == {"slice_1", "slice_2"}
    assert {user.name for user in nodes["keys"].users} == {"clone_default", "slice_3", "copy_", "output"}
    x, keys, dy = torch.randn(4, 4), torch.randn(8, 4), torch.randn(4, 4)
    gm.recompile()
    returned, y, z, dx, dz = gm(x, old := keys.clone(), dy)
    assert returned is old and torch.equal(old, torch.cat([x, x]))
    torch.testing.assert_close((y, z, dx, dz), (x @ keys[:4], x @ keys[4:], dy @ keys[:4].t(), dy @ keys[4:].t()))


def test_no_more_is_copied_than_what_all_read() -> None:
    gm = queue(lambda s, keys: s.call(aten.permute.default, rows(2)(s, keys), [1, 0]))
    assert save_reads(gm) == 1
    (copy,) = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert copy.meta["val"].shape == (4, 4) and copy.args[0].name == "permute"


def test_what_a_checkpoint_has_marked_is_left_alone() -> None:
    gm = finished(joint(plus_one))
    (reader,) = (n for n in gm.graph.nodes if n.name == "add")
    reader.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert save_reads(gm) == 0
    assert reader.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE


class Counting(nn.Module):
    """What a layer brings is scaled by something that forward writes to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.head, self.how = nn.Linear(6, 6), nn.Linear(6, 3), how
        self.register_buffer("seen", torch.linspace(0.5, 1, 6))
        self.register_buffer("queue", torch.linspace(0.5, 1, 36).view(6, 6))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.body(x))
        if self.how == "written, then read":
            self.seen.add_(1)
            h = h * (1 + self.seen / 8)
        elif self.how == "read, then written":
            h = h * (self.seen * 2)
            self.seen.add_(1)
        elif self.how == "read as a view":
            h = h * self.seen.view(2, 3).t().exp().reshape(-1)
            self.seen.add_(1)
        elif self.how == "read as a copy":
            h = (h @ self.seen.clone().detach().view(2, 3).repeat(3, 2)) + h * self.seen.clone()
            with torch.no_grad():
                self.seen.copy_(h[0, 0])
        elif self.how == "a queue of keys":
            self.step += 1
            h = h @ self.queue.clone().t() / self.step
            with torch.no_grad():
                self.queue[2:4] = h[0, :2].detach()
        elif self.how == "a running mean":
            self.seen.lerp_(h.detach().mean((0, 1)), 0.5)
            h = (h - self.seen).tanh()
        else:
            assert self.how == "read in another dtype"
            h = h * self.seen.double().sin().to(h.dtype)
            self.seen.mul_(1.5)
        return self.head(h).square().mean()


WAYS = ["written, then read", "read, then written", "read as a view", "a running mean", "read in another dtype"]
WAYS += ["read as a copy", "a queue of keys"]


def check_gradients(how: str, stage: int) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Counting(how))
    model, plain = models
    zerofx.compile(model, stage=stage)
    for step in range(3):
        x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step))  # the same on all ranks
        for each in (model, plain):
            each.zero_grad()
            each(x).backward()
        for a, b in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(a, b)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            grad = p.grad.full_tensor() if isinstance(p.grad, zerofx.ShardedTensor) else p.grad
            torch.testing.assert_close(grad, q.grad)


@quick_if(lambda how, stage: (how, stage) in [("a queue of keys", 3), ("read, then written", 2)])
@pytest.mark.parametrize(("how", "stage"), [(how, 3) for how in WAYS] + [(WAYS[0], 0), (WAYS[1], 2), (WAYS[-1], 0)])
def test_gradients_are_those_of_eager_pytorch_with_what_forward_read(workers2: Workers, how: str, stage: int) -> None:
    workers2.run(check_gradients, how, stage)
