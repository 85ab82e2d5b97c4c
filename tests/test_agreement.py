"""tests/agreement.py tells ranks that hold different weights, or would compute with them, from those that do not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests import models
from tests.agreement import assert_ranks_agree, disagreements
from tests.workers import Workers
from zerofx.runtime.state.group import groups_of


def check_disturbed(stage: int) -> list[str]:
    net, rank = zerofx.compile(models.build("mlp", dist.get_rank()), stage=stage, executor="eager"), dist.get_rank()
    batch = models.slice_batch(models.make_batch("mlp", 4), rank, dist.get_world_size())
    models.loss_of(net, batch).backward()
    models.sgd(net.parameters()).step()
    assert_ranks_agree(net)
    with torch.no_grad():
        if stage == 0:
            net.second.weight[0, 0] += rank
        else:
            groups_of(net)[0].weights.start_gather()[0] += rank
    with pytest.raises(AssertionError, match="ranks hold different weights"):
        assert_ranks_agree(net)
    return disagreements(net)


@pytest.mark.parametrize("stage", [0, 2])
def test_ranks_with_different_weights_are_told(workers2: Workers, stage: int) -> None:
    for names in workers2.run(check_disturbed, stage):
        assert (names == ["second.weight"]) if stage == 0 else ("group first" in names), names
