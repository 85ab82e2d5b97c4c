"""spare_gathers: what would gather weights for recomputation alone is saved; other cuts stay with the partitioner."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import zerofx
from tests.passes.graphs import Sketch, aten
from zerofx.passes import edit, spare_gathers


def marked(gm: GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]


def joint(*, needed: bool = False, cast: bool = False) -> tuple[Sketch, list[Node]]:
    """``mm(embedding(table, ids), w)`` and its gradients; ``needed``: backward reads the table as well."""
    s = Sketch()
    (table,) = s.parameters("table", table=(16, 8))
    (w,) = s.parameters("w", w=(8, 4))
    ids, dy = s.input("ids", 5, dtype=torch.int64), s.input("tangents_1", 5, 4)
    rows = s.call(aten._to_copy.default, table, dtype=torch.half) if cast else table
    found = s.call(aten.embedding.default, rows, ids)
    if cast:
        found = s.call(aten._to_copy.default, found, dtype=torch.float32)
    y = s.call(aten.mm.default, found, w)
    dw = s.call(aten.mm.default, s.call(aten.t.default, found), dy)
    dfound = s.call(aten.mm.default, dy, s.call(aten.t.default, w))
    dtable = s.call(aten.embedding_dense_backward.default, dfound, ids, 16, -1, False)
    if needed:
        dtable = s.call(aten.add.Tensor, dtable, table)
    return s, [y, dtable, dw]


def test_what_reads_a_weight_that_backward_has_no_use_for_is_to_be_saved() -> None:
    s, outputs = joint()
    gm, ctx = s.done(*outputs)
    assert spare_gathers(gm, ctx.parameters) == 1
    assert marked(gm) == ["embedding"]


def test_a_weight_is_read_through_views_and_casts_too() -> None:
    s, outputs = joint(cast=True)
    gm, ctx = s.done(*outputs)
    assert spare_gathers(gm, ctx.parameters) == 1
    assert marked(gm) == ["embedding"]


def test_where_backward_gathers_the_group_anyway_the_partitioner_is_free() -> None:
    s, outputs = joint(needed=True)
    gm, ctx = s.done(*outputs)
    assert spare_gathers(gm, ctx.parameters) == 0
    assert marked(gm) == []


def test_what_a_checkpoint_has_marked_is_left_alone() -> None:
    s, outputs = joint()
    gm, ctx = s.done(*outputs)
    (found,) = (n for n in gm.graph.nodes if n.name == "embedding")
    found.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert spare_gathers(gm, ctx.parameters) == 0
    assert found.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE


def test_a_graph_without_sharded_parameters_is_left_alone() -> None:
    s, outputs = joint()
    gm, _ = s.done(*outputs)
    assert spare_gathers(gm, {}) == 0


class Language(nn.Module):
    """Positions are added to what is looked up: cheap to recompute, for who has the tables."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(4096, 32), nn.Embedding(8, 32)
        self.blocks = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
        self.checkpointed = checkpointed

    def look_up(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) + self.positions.weight[: x.shape[1]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.look_up, x, use_reentrant=False) if self.checkpointed else self.look_up(x)
        for block in self.blocks:
            h = h + F.gelu(block(h))
        return h.square().mean()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_compiled_backward_gathers_no_embedding_unless_a_checkpoint_asks_for_it(checkpointed: bool) -> None:
    record = zerofx.dry_run(Language(checkpointed), torch.zeros(2, 8, dtype=torch.int64), world_size=2)
    assert record.forward is not None and record.backward is not None
    needed = [edit.tagged(trace.after("gather").graph, "shard") for trace in (record.forward, record.backward)]
    forward, backward = ({node.meta["zerofx"].group for node in nodes} for nodes in needed)
    assert "tokens" in forward
    assert ("tokens" in backward) == checkpointed
