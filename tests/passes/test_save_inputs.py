"""save_inputs: in the place of a view of an input forward saves the input, whose version autograd compares."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zerofx
from tests.passes.graphs import Sketch, aten
from tests.workers import Workers
from zerofx.passes import save_inputs


def test_an_input_is_saved_in_the_place_of_its_views_and_once() -> None:
    s = Sketch()
    x, queue = s.input("x", 4, 4), s.input("queue", 8, 4)
    part = s.call(aten.slice.Tensor, queue, 0, 0, 4)
    turned = s.call(aten.permute.default, part, [1, 0])
    y = s.call(aten.mm.default, x, turned)
    gm, ctx = s.done(y)
    assert save_inputs(gm.graph, [x, turned, y, part], ctx.parameters) == [x, queue, y]


def test_casts_results_weights_and_what_the_graph_writes_to_are_left_alone() -> None:
    s = Sketch()
    (w,) = s.parameters("a", w=(4, 4))
    x, keys = s.input("x", 4, 4), s.input("keys", 4, 4)
    of_weight, of_written = s.call(aten.permute.default, w, [1, 0]), s.call(aten.permute.default, keys, [1, 0])
    cast, y = s.call(aten._to_copy.default, x, dtype=torch.float64), s.call(aten.mm.default, x, of_weight)
    of_result = s.call(aten.permute.default, y, [1, 0])
    s.call(aten.copy_.default, keys, x)
    gm, ctx = s.done(y)
    saved = [of_weight, of_written, cast, of_result]
    assert save_inputs(gm.graph, saved, ctx.parameters) == saved


class Queue(nn.Module):
    """The graph ends at ``int``. Behind it the queue is written to, of which Inductor drops the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("queue", torch.randn(4, 6))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for p, q in zip(self.first.parameters(), self.second.parameters()):
                q.data = q.data * 0.9 + p.data * 0.1
        y = self.first(x) @ self.queue.clone().detach()
        place = int(self.place)
        self.queue[:, place : place + 2] = self.second(x).detach()[:2].T
        return y.square().sum()


def check_queue(stage: int, executor: str) -> None:
    torch.manual_seed(0)
    plain, module = Queue(), Queue()
    module.load_state_dict(plain.state_dict())
    zerofx.compile(module, stage=stage, executor=executor)
    x = torch.ones(3, 4)
    loss = module(x)
    plain(x).backward()
    if executor == "eager":
        loss.backward()
        grad = module.first.weight.grad
        torch.testing.assert_close(getattr(grad, "full_tensor", lambda: grad)(), plain.first.weight.grad)
    else:
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("executor", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_of_what_is_written_between_graphs_are_right_or_refused(
    workers2: Workers, stage: int, executor: str
) -> None:
    workers2.run(check_queue, stage, executor)
