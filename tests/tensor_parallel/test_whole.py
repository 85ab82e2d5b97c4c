"""Of parameters that are DTensors on another dimension the whole is seen: norms, weights, checkpoints, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import parallelize_module

import zerofx
from tests.slow import quick_if, slow
from tests.tensor_parallel.models import (
    MLP,
    adamw,
    batch,
    build,
    check_whole,
    compiled,
    mesh_2d,
    skip_old,
    train,
    weights_of,
    whole,
)
from zerofx.compiler.apart import check_version

pytestmark = skip_old


def clip_beside(stage: int) -> None:
    """Each norm counts a replicated weight once, and a part once for all of its copies; clipping follows from that."""
    mesh = mesh_2d()
    for kind in ("mlp", "transformer"):
        ours, alone = compiled(kind, mesh, stage), build(kind)
        theirs = fully_shard(build(kind, mesh["tp"]), mesh=mesh["dp"])
        optimizers = {m: adamw(m) for m in (ours, alone, theirs)}
        for step in range(2):
            mine = batch(step)[mesh["dp"].get_local_rank()]
            norms = {}
            for m, tokens in ((ours, mine), (theirs, mine), (alone, batch(step).flatten(0, 1))):
                m(tokens).backward()
                if m is not theirs or kind == "transformer":  # FSDP2 does not clip DTensors of two meshes together
                    for order in (2.0, float("inf"), 1.0):
                        norm = torch.nn.utils.get_total_norm([p.grad for p in m.parameters()], order)
                        norms[m, order] = whole(norm).item()
                    norms[m, "clip"] = whole(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)).item()
                    norms[m, "after"] = whole(torch.nn.utils.get_total_norm([p.grad for p in m.parameters()])).item()
                    optimizers[m].step()
                optimizers[m].zero_grad()
            for (m, what), value in norms.items():
                assert value == pytest.approx(norms[alone, what], rel=1e-5), (kind, what, m is ours)
        first = ours.get_parameter("up.weight")
        if stage:
            with torch.no_grad():
                assert first.sum().item() == pytest.approx(alone.up.weight.sum().item(), rel=1e-4, abs=1e-5)
                assert first.max().item() == pytest.approx(alone.up.weight.max().item(), rel=1e-5)
                assert first.mean().item() == pytest.approx(alone.up.weight.mean().item(), rel=1e-4, abs=1e-6)


@quick_if(lambda stage: stage == 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norms_are_of_the_whole_model_and_clip_it_as_fsdp2_does(make_workers: Any, stage: int) -> None:
    make_workers(4).run(clip_beside, stage)


def clip_in_the_step(stages: list[int]) -> None:
    mesh = mesh_2d()
    alone = build("transformer")
    reference = zerofx.AdamW(alone.parameters(), lr=1e-2, max_grad_norm=0.1)
    wanted = train(alone, reference)
    for stage in stages:
        ours = compiled("transformer", mesh, stage)
        optimizer = zerofx.AdamW(ours.parameters(), lr=1e-2, max_grad_norm=0.1)
        assert train(ours, optimizer, mesh["dp"]) == pytest.approx(wanted, rel=1e-5), stage
        assert optimizer.grad_norm.item() == pytest.approx(reference.grad_norm.item(), rel=1e-5), stage


@pytest.mark.parametrize("stages", [[3], slow([0, 1, 2])])
def test_zerofx_adamw_clips_by_the_norm_of_the_whole_model(make_workers: Any, stages: list[int]) -> None:
    make_workers(4).run(clip_in_the_step, stages)


def read_and_write(stage: int) -> None:
    mesh = mesh_2d()
    alone = build("transformer")
    ours = compiled("transformer", mesh, stage)
    state = ours.state_dict()
    for name, p in ours.named_parameters():
        value = alone.get_parameter(name).detach()
        assert state[name].shape == value.shape
        torch.testing.assert_close(whole(state[name]), value)
        if stage:
            assert p.shape == value.shape and p.size(0) == len(value) and p.numel() == value.numel()
            assert p.stride() == value.stride() and len(p) == len(value)
            torch.testing.assert_close(p.full_tensor(), value)
    changed = {name: value + 1 for name, value in weights_of(alone).items()}
    ours.load_state_dict(changed)
    check_whole(ours, changed)
    with zerofx.unsharded(ours):
        assert isinstance(ours.up.weight, DTensor)
        torch.testing.assert_close(ours.up.weight.full_tensor(), changed["up.weight"])
        with torch.no_grad():
            ours.up.weight.mul_(2)
            loss = ours(batch(0)[0])
    changed["up.weight"] *= 2
    check_whole(ours, changed)
    alone.load_state_dict(changed)
    assert whole(loss).item() == pytest.approx(alone(batch(0)[0]).item(), rel=1e-5)
    with pytest.raises(RuntimeError, match=r"'up.weight' was edited"), zerofx.unsharded(ours), torch.no_grad():
        if mesh["tp"].get_local_rank() == 0:
            ours.up.weight.mul_(2)
    check_whole(ours, changed)


@pytest.mark.parametrize("stage", [3, 0, slow(2)])
def test_weights_have_the_shape_of_the_whole_and_are_read_and_written_whole(make_workers: Any, stage: int) -> None:
    make_workers(4).run(read_and_write, stage)


def save_and_go_on(stages: list[int], folder: str, others: bool) -> None:
    """What is saved goes on on the same mesh, and in one process; ``others``: with FSDP2, and through its functions."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    mesh = mesh_2d()
    alone = build("transformer")
    reference = adamw(alone)
    train(alone, reference, steps=2)
    wanted = train(alone, reference, first=2)

    def check(model: Any, optimizer: Any, dp: Any = None) -> None:
        assert train(model, optimizer, dp, first=2) == pytest.approx(wanted, rel=1e-5)

    def load(path: str, model: Any) -> Any:
        """PyTorch's way."""
        optimizer = adamw(model)
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": state}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        return optimizer

    kinds = ["", "dcp"] if others else [""]
    for stage in stages:
        ours = compiled("transformer", mesh, stage)
        optimizer = adamw(ours)
        train(ours, optimizer, mesh["dp"], steps=2)
        zerofx.save(f"{folder}/{stage}", ours, optimizer)
        if others:
            model, optim = get_state_dict(ours, optimizer)
            dcp.save({"model": model, "optim": optim}, checkpoint_id=f"{folder}/dcp{stage}")
        check(ours, optimizer, mesh["dp"])
    for path in [f"{folder}/{kind}{stage}" for stage in stages for kind in kinds]:
        for stage in stages:
            again = compiled("transformer", mesh, stage)
            optimizer = adamw(again)
            zerofx.load(path, again, optimizer)
            check(again, optimizer, mesh["dp"])
        plain = build("transformer", seed=5)
        optimizer = adamw(plain)
        zerofx.load(path, plain, optimizer)
        check(plain, optimizer)
        if others:
            theirs = fully_shard(build("transformer", mesh["tp"], seed=5), mesh=mesh["dp"])
            check(theirs, load(path, theirs), mesh["dp"])
    for stage in stages if others else ():
        again = compiled("transformer", mesh, stage)
        check(again, load(f"{folder}/dcp{stage}", again), mesh["dp"])


CHECKPOINTS = [([3], False), *(slow(stages, True) for stages in ([0], [2, 1], [3]))]


@pytest.mark.parametrize(("stages", "others"), CHECKPOINTS)
def test_a_checkpoint_is_of_the_whole_and_goes_on_anywhere(
    make_workers: Any, stages: list[int], others: bool, tmp_path: Any
) -> None:
    make_workers(4).run(save_and_go_on, stages, str(tmp_path), others, timeout=300)


def export(folder: str) -> None:
    mesh = mesh_2d()
    ours = compiled("transformer", mesh)
    zerofx.export_safetensors(ours, folder)
    again = compiled("transformer", mesh)
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    zerofx.load(folder, again)
    wanted = weights_of(build("transformer"))
    check_whole(again, wanted)
    plain = build("transformer", seed=5)
    zerofx.load(folder, plain)
    assert all(torch.equal(p, wanted[name]) for name, p in plain.named_parameters())


def test_exported_weights_are_whole(make_workers: Any, tmp_path: Any) -> None:
    make_workers(4).run(export, str(tmp_path))


def refuse() -> None:
    mesh = mesh_2d()
    dp, tp = mesh["dp"], mesh["tp"]

    def refused(match: str, model: nn.Module, error: type[Exception] = ValueError, **options: Any) -> None:
        before = dict(model.named_parameters())
        with pytest.raises(error, match=match):
            zerofx.compile(model, **{"mesh": dp, "executor": "eager", **options})
        assert all(p is before[name] for name, p in model.named_parameters())

    model = build("mlp", tp)
    refused(r"'up.weight' is a DTensor over the ranks .* are in both. .*mesh=mesh\[\"dp\"\]", model, mesh=tp)
    refused(r"'up.weight' is a DTensor over the ranks .* are in both", model, mesh=None)
    with torch.device("meta"):
        meta = MLP()
    refused(r"'up.weight' is a DTensor on the meta device.*to_empty", parallelize_module(meta, tp, dict(MLP.plan)))
    model.up.weight.register_post_accumulate_grad_hook(print)
    refused(r"'up.weight' is a DTensor with a hook on its gradient.*after zerofx.compile", model)
    model = build("mlp", tp)
    model.up.weight.grad = torch.zeros_like(model.up.weight)
    refused(r"'up.weight' has a gradient already", model)
    model = build("mlp", tp)
    both = DTensor.from_local(torch.ones(2, 2), tp, [Partial()])
    model.sum = nn.Parameter(both)
    refused(r"'sum' is a DTensor with the placements .*Partial.*: expected Shard and Replicate alone", model)
    torch.manual_seed(dist.get_rank())  # the plain head is drawn from another seed on each rank
    apart = parallelize_module(MLP(), tp, dict(MLP.plan))
    refused(r"'head.weight' has other values on rank 1 than on rank 0.*from one seed", apart)
    optimizer = adamw(model := build("mlp", tp))
    zerofx.compile(model, executor="eager", mesh=dp)
    model(batch(0)[0]).backward()
    with pytest.raises(RuntimeError, match=r"AdamW has 'up.weight' as the DTensor that it was before zerofx.compile"):
        optimizer.step()
    pending = compiled("pending", mesh)
    with pytest.raises(Exception, match=r"the input .* is the result of a collective .*still on its way.*clone"):
        pending(batch(0)[0])
    traced = torch.compile(build("mlp", tp), backend="zerofx", options={"stage": 3, "executor": "eager"})
    with pytest.raises(Exception, match=r"a DTensor, and the module is being traced already: call zerofx.compile"):
        traced(batch(0)[0])


def test_old_versions_are_refused_but_in_stage_0() -> None:
    for version, stage in [("2.13.0", 3), ("2.15.0+cpu", 1), ("2.11.0", 0)]:
        check_version(stage, version)
    with pytest.raises(ValueError, match=r"DTensor parameters with stage=3 and PyTorch 2.11.0.*Expected PyTorch 2.13"):
        check_version(3, "2.11.0")


def test_what_cannot_be_taken_apart_is_refused_by_name(make_workers: Any) -> None:
    make_workers(4).run(refuse)


def tell(path: str) -> None:
    mesh = mesh_2d()
    ours = compiled("transformer", mesh, 3)
    optimizer = adamw(ours)
    train(ours, optimizer, mesh["dp"], steps=1)
    parts = sum(p.to_local().numel() for p in build("transformer", mesh["tp"]).parameters())
    summary = zerofx.memory_summary(ours, optimizer)
    layouts = {p._group.layout for p in ours.parameters()}
    assert sum(slot.numel for layout in layouts for slot in layout.slots) == parts
    assert summary.nbytes["shards"] == 4 * sum(layout.shard_numel for layout in layouts)
    zerofx.report(ours, f"{path}/{dist.get_rank()}.html")
    planned = zerofx.plan(build("transformer", mesh["tp"]), world_size=2)
    assert planned.parameters == parts
    again = build("transformer", mesh["tp"])
    record = zerofx.dry_run(again, batch(0)[0], world_size=2, executor="eager", groups=zerofx.Grouping(min_bytes=0))
    assert isinstance(again.up.weight, DTensor)
    assert str(record.forward) == str(zerofx.graphs(ours)[0].forward)
    zerofx.predict(record)


@pytest.mark.slow
def test_what_tells_of_memory_counts_this_ranks_parts(make_workers: Any, tmp_path: Any) -> None:
    make_workers(4).run(tell, str(tmp_path))
