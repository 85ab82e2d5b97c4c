"""The optimizer's state in the host's memory: the numbers of a run on the device, bit for bit, through a few buffers.

The CPU stands for the device (tests/seams/copies.py). tests/nccl/test_copies.py has the order of CUDA's streams.
"""

from __future__ import annotations

import copy
import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint

import zerofx
from tests.seams.copies import AtOnce, staged
from tests.slow import slow, slow_if
from tests.test_offload import BF16, EACH_LAYER, OPTIMIZERS, Net, give, named, sharded, steps, whole
from tests.workers import Workers
from zerofx.compiler import checks
from zerofx.kernels.split import join
from zerofx.model.units import format_bytes
from zerofx.runtime.state.group import groups_of
from zerofx.runtime.state.home import HOMES

ON_HOST: dict[str, Any] = {
    **{name: OPTIMIZERS[name] for name in ("zerofx", "decayed in part", "bf16 moments", "split")},
    "8bit": lambda ps: zerofx.AdamW(ps, lr=0.1, moments="8bit", max_grad_norm=1.0),
}


def trained(offload: Any, options: dict[str, Any], optimizer: str, how: str, low: bool) -> tuple[list[Any], Any, Any]:
    net = Net().bfloat16() if low else Net()
    model = zerofx.compile(net, groups=EACH_LAYER, offload=offload, **options)
    stepper = ON_HOST[optimizer](list(model.parameters()))
    return [*steps(model, stepper, how, 3), *whole(model)], model, stepper


def both_ways(options: dict[str, Any], optimizer: str, how: str, low: bool = False, offload: Any = "cpu") -> str:
    """What is wrong with a run whose state is in the host's memory; "" if nothing is."""
    wanted, _, plain = trained(None, options, optimizer, how, low)
    with staged():
        found, model, stepper = trained(offload, options, optimizer, how, low)
    if not all(a.equal(b) for a, b in zip(found, wanted, strict=True)):
        return "losses or weights differ"
    for mine, theirs in zip(stepper.state.values(), plain.state.values(), strict=True):
        if not all(_local(mine[name]).equal(_local(theirs[name])) for name in theirs):
            return "state differs"
    (staging,) = {group.home.staging for group in groups_of(model)} - {None}
    assert staging is not None and staging.nbytes - staging.pinned.nbytes == 4 << 13
    there = [p for p in model.parameters() if p._group.home.hosts]  # type: ignore[attr-defined]
    at_rest = sum(p._local.untyped_storage().nbytes() for p in there)  # type: ignore[attr-defined]
    if "weights" in staging.holds and at_rest:
        return f"{at_rest} bytes of weights are on the device at rest"
    numel = sum(p._local.numel() for p in there)  # type: ignore[attr-defined]
    least = 3 * numel * next(model.parameters()).element_size()
    if not staging.taken >= least or not staging.brought >= least:
        return f"{staging.brought} bytes came and {staging.taken} went, of {least} or more"
    gc.collect()
    return "" if all(x.isfinite().all() for x in found) else "not finite"


def _local(x: torch.Tensor) -> torch.Tensor:
    return x._local if isinstance(x, zerofx.ShardedTensor) else x


EAGER = {"executor": "eager"}
WEIGHTS, GRADIENTS = zerofx.Offload("cpu", weights="cpu"), zerofx.Offload("cpu", gradients="cpu")
ALL = zerofx.Offload("cpu", "cpu", "cpu")
CASES: dict[str, Any] = {
    "3": ({"stage": 3, **EAGER}, "zerofx", ""),
    "1": ({"stage": 1, **EAGER}, "decayed in part", "no_sync"),
    "2 in backward": ({"stage": 2, **EAGER}, "decayed in part", "in backward"),
    "2 mixed": ({"stage": 2, "mixed_precision": BF16, **EAGER}, "zerofx", "accumulation"),
    "3 bf16 moments": ({"stage": 3, **EAGER}, "bf16 moments", ""),
    "2 8bit": ({"stage": 2, **EAGER}, "8bit", ""),
    "3 low": ({"stage": 3, **EAGER}, "zerofx", "", True),
    "2 low split": ({"stage": 2, **EAGER}, "split", "", True),
    "3 half": ({"stage": 3, **EAGER}, "zerofx", "", False, zerofx.Offload(optimizer="cpu", fraction=0.5)),
    "3 inductor": ({"stage": 3, "executor": "inductor"}, "zerofx", ""),
    "3 weights": ({"stage": 3, **EAGER}, "decayed in part", "", False, WEIGHTS),
    "3 weights in backward": ({"stage": 3, **EAGER}, "decayed in part", "in backward", False, WEIGHTS),
    "1 gradients": ({"stage": 1, **EAGER}, "zerofx", "accumulation", False, GRADIENTS),
    "2 gradients": ({"stage": 2, **EAGER}, "decayed in part", "no_sync", False, GRADIENTS),
    "2 gradients in backward": ({"stage": 2, **EAGER}, "decayed in part", "in backward", False, GRADIENTS),
    "3 gradients": ({"stage": 3, "mixed_precision": BF16, **EAGER}, "zerofx", "", False, GRADIENTS),
    "3 all": ({"stage": 3, **EAGER}, "zerofx", "accumulation", False, ALL),
    "3 all mixed": ({"stage": 3, "mixed_precision": BF16, **EAGER}, "zerofx", "no_sync", False, ALL),
    "3 all bf16 moments": ({"stage": 3, **EAGER}, "bf16 moments", "", False, ALL),
    "3 all 8bit": ({"stage": 3, **EAGER}, "8bit", "", False, ALL),
    "3 all low": ({"stage": 3, **EAGER}, "zerofx", "", True, ALL),
    "3 all low split": ({"stage": 3, **EAGER}, "split", "accumulation", True, ALL),
    "3 all half": ({"stage": 3, **EAGER}, "zerofx", "", False, zerofx.Offload("cpu", "cpu", "cpu", fraction=0.5)),
    "3 all inductor": ({"stage": 3, "executor": "inductor"}, "zerofx", "", False, ALL),
}
QUICK = ("3", "1", "2 in backward", "2 mixed", "2 8bit", "3 half", "3 weights", "2 gradients", "3 all")


@slow_if(lambda case: case not in QUICK)
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_state_on_the_device_bit_for_bit(workers2: Workers, case: str) -> None:
    assert workers2.run(both_ways, *CASES[case]) == ["", ""]


def resumed(folder: str, saver: str, there: Any) -> list[bool]:
    """Two steps, a checkpoint, a third; and the third anew from the checkpoint, with state on the host and without."""
    with staged():
        model, step = sharded(there)
        for seed in range(2):
            give(model, step, seed)
        if saver == "zerofx":
            zerofx.save(folder, model, step)
        else:
            checkpoint.save(
                {"model": dict(model.named_parameters()), "optim": named(model, step)}, checkpoint_id=folder
            )
        give(model, step, 2)
        found = []
        for offload in (there, None):
            again, its = sharded(offload)
            give(again, its, 7)  # numbers that the checkpoint's must replace
            if saver == "zerofx":
                zerofx.load(folder, again, its)
            else:
                checkpoint.load(
                    {"model": dict(again.named_parameters()), "optim": named(again, its)}, checkpoint_id=folder
                )
                for p in again.parameters():
                    its.state[p]["step"].fill_(2)
                its.load_state_dict(its.state_dict())
            give(again, its, 2)
            found.append(all(a.equal(b) for a, b in zip(whole(again), whole(model), strict=True)))
        moment = step.state[next(model.parameters())]["exp_avg"]
        return [*found, moment.full_tensor().norm().allclose(moment.norm())]


@pytest.mark.parametrize("saver", ["zerofx", "torch"])
@pytest.mark.parametrize("offload", ["cpu", ALL], ids=["", "all"])
def test_a_run_goes_on_from_a_checkpoint(workers2: Workers, tmp_path: Path, saver: str, offload: Any) -> None:
    assert workers2.run(resumed, str(tmp_path / "saved"), saver, offload) == [[True] * 3] * 2


def handled(offload: Any) -> list[Any]:
    """What code outside of graphs does with weights and gradients: copies, averages, writes, views that are kept."""
    with staged():
        model = zerofx.compile(Net(), groups=EACH_LAYER, offload=offload, stage=3, **EAGER)
        step, average = zerofx.AdamW(model.parameters(), lr=0.1), zerofx.EMA(model, decay=0.9)
        x = torch.ones(2, 91) * (1 + dist.get_rank())

        def train(model: Any, step: zerofx.AdamW) -> None:
            model(x).square().mean().backward()
            step.step()
            step.zero_grad(set_to_none=False)

        for _ in range(2):
            train(model, step)
            average.update()
        twin = copy.deepcopy(model)
        train(twin, zerofx.AdamW(twin.parameters(), lr=0.1))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
                p.data.clamp_(-0.1, 0.1)
        model(x).square().mean().backward()
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(2)
        step.step()
        view = next(model.parameters()).to_local()  # type: ignore[operator]
        with torch.no_grad():
            view.add_(1)
        train(model, step)
        with average.swapped():
            averaged = whole(model)
        return [*norms, view.detach().clone(), *averaged, *whole(model), *whole(twin)]


def test_code_outside_of_graphs_finds_what_it_would_find_on_the_device(workers2: Workers) -> None:
    found, wanted = workers2.run(handled, ALL), workers2.run(handled, None)
    for mine, plain in zip(found, wanted, strict=True):
        assert all(a.equal(b) for a, b in zip(mine, plain, strict=True)) and all(x.isfinite().all() for x in mine)


def scaled(offload: Any, stage: int, unscale: bool) -> list[Any]:
    """Three steps under a `GradScaler`; of the second one rank has a gradient that is not finite."""
    torch._dynamo.reset()
    with staged():
        model = zerofx.compile(Net(), groups=EACH_LAYER, offload=offload, stage=stage, **EAGER)
        step = zerofx.AdamW(model.parameters(), lr=0.1, max_grad_norm=None if unscale else 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        norms = []
        for i in range(3):
            x = torch.full((2, 91), float("inf") if i == 1 and dist.get_rank() == 1 else 0.1 * (i + 1))
            scaler.scale(model(x).square().mean()).backward()
            if unscale:
                scaler.unscale_(step)
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            scaler.step(step)
            scaler.update()
            step.zero_grad()
        assert scaler.get_scale() == 512.0
        return [*norms[::2], *whole(model)]


@pytest.mark.parametrize(
    ("offload", "stage", "unscale"),
    [(ALL, 3, False), slow(ALL, 3, True), slow(GRADIENTS, 1, False), slow(GRADIENTS, 2, True), slow(WEIGHTS, 3, True)],
)
def test_a_grad_scaler_scales_and_skips(workers2: Workers, offload: Any, stage: int, unscale: bool) -> None:
    found, wanted = (workers2.run(scaled, each, stage, unscale) for each in (offload, None))
    for mine, plain in zip(found, wanted, strict=True):
        assert all(a.equal(b) for a, b in zip(mine, plain, strict=True)) and all(x.isfinite().all() for x in mine)


def masters(folder: str) -> bool:
    """A float32 model takes up what a bfloat16 one, with half of its masters' bits on the host, has saved."""
    with staged():
        model, step = sharded("cpu", "split", Net().bfloat16())
        give(model, step, 0)
        zerofx.save(folder, model, step)
        again, its = sharded("cpu", "zerofx")
        zerofx.load(folder, again, its)
        return all(
            a.full_tensor().equal(join(b.full_tensor(), step.state[b]["remainder"].full_tensor()))  # type: ignore[operator]
            for a, b in zip(again.parameters(), model.parameters(), strict=True)
        )


def test_a_master_in_two_halves_on_device_and_host_is_loaded_into_one(workers2: Workers, tmp_path: Path) -> None:
    assert workers2.run(masters, str(tmp_path / "saved")) == [True, True]


def test_what_a_rank_holds_is_counted_on_the_host_and_pinned(fake_world: Any) -> None:
    fake_world(2)
    with staged():
        model, step = sharded("cpu")
        give(model, step, 0)
        summary = zerofx.memory_summary(model, step)
    numel = sum(p._local.numel() for p in model.parameters())
    assert 8 * numel <= summary.on_host < 8.1 * numel
    assert summary.pinned == 4 << 13 and summary.nbytes["optimizer state"] < 1000  # counters of steps
    assert "on the host" in str(summary) and "pinned" in str(summary) and summary.total < 9 * numel


def test_weights_and_gradients_on_the_host_leave_nothing_on_the_device(fake_world: Any) -> None:
    fake_world(2)
    with staged():
        model = zerofx.compile(Net(), groups=EACH_LAYER, stage=3, executor="eager", offload=ALL)
        step = zerofx.AdamW(model.parameters())
        model(torch.ones(2, 91)).sum().backward()
        step.step()
        summary = zerofx.memory_summary(model, step)
    numel = sum(p._local.numel() for p in model.parameters())  # type: ignore[attr-defined]
    assert summary.nbytes["shards"] == summary.nbytes["gradients"] == 0 and summary.total < 1000
    assert summary.pinned_of == ("weights", "gradients") and summary.pinned - (4 << 13) >= 8 * numel
    assert "weights, gradients" in str(summary)
    (record,) = zerofx.graphs(model)
    assert "  on host  optimizer state, weights and gradients of 3 groups" in str(record.forward).splitlines()
    assert "on host  its optimizer state, weights and gradients" in record.forward.explain("wait_reload head")
    assert "from the host: one group ahead is the most" in record.forward.explain("all_gather head")


def test_what_is_predicted_is_what_is_predicted_of_a_file(fake_world: Any) -> None:
    """Its bytes tests/test_offload_predicted.py measures; and nothing passes through buffers.

    The same graphs where the budget has no room for what starts two groups ahead from a file.
    """
    fake_world(2)
    options: dict[str, Any] = {"groups": EACH_LAYER, "stage": 3, "executor": "eager", "memory_budget": 90_000}
    with staged():
        model = zerofx.compile(Net(), offload=ALL, **options)
        model(torch.ones(2, 91)).sum().backward()
        host = zerofx.predict(model)
    nowhere = zerofx.Offload("/nowhere", "/nowhere", "/nowhere")
    file = zerofx.predict(
        zerofx.dry_run(Net(), torch.ones(2, 91), world_size=2, backend="fake", offload=nowhere, **options)
    )
    assert host.held_bytes == 0 and host.files is None and file.files is not None
    assert [phase.live for phase in host.phases] == [phase.live for phase in file.phases]
    shards = sum(group.layout.shard_numel * 4 for group in groups_of(model))
    assert host.file_written == shards < host.file_read < file.file_read  # of a file whole pages
    slow_link = zerofx.predict(model, zerofx.Rates(1e15, 1e15, 1e15, host_copy_bytes_per_s=1e6))
    assert slow_link.time_s == pytest.approx((host.file_read + shards) / 1e6, rel=0.05)
    assert str(slow_link).splitlines()[-1].endswith(", at 1.0 MB/s")
    assert str(zerofx.predict(model, zerofx.Rates(1e15, 1e15, 1e15))).endswith(", at 20.0 GB/s, a default")


@pytest.mark.parametrize(
    ("stage", "offload"), [(2, zerofx.Offload("cpu")), (3, GRADIENTS), (3, WEIGHTS), (3, ALL)], ids=str
)
@pytest.mark.parametrize("low", [False, True])
def test_what_the_step_copies_is_predicted(fake_world: Any, stage: int, offload: zerofx.Offload, low: bool) -> None:
    fake_world(2)
    with staged():
        net = Net().bfloat16() if low else Net()
        model = zerofx.compile(net, groups=EACH_LAYER, stage=stage, executor="eager", offload=offload)
        step = zerofx.AdamW(model.parameters())
        (staging,) = {group.home.staging for group in groups_of(model)}
        assert staging is not None
        for _ in range(2):  # the first makes the optimizer's state
            model(torch.ones(2, 91, dtype=torch.bfloat16 if low else None)).sum().backward()
            before = staging.brought, staging.taken
            step.step()
            step.zero_grad()
        found = staging.brought - before[0], staging.taken - before[1]
        prediction = zerofx.predict(model, zerofx.Rates(1e15, 1e15, 1e15, host_copy_bytes_per_s=1e6))
    assert prediction.hosted is not None and prediction.hosted[:2] == found
    assert prediction.optimizer_s == pytest.approx(max(found) / 1e6, abs=1e-9)
    numel = sum(p._local.numel() for p in model.parameters())  # type: ignore[attr-defined]
    assert prediction.hosted.touched == 28 * numel
    out, back = map(format_bytes, found)
    said = f"it copies {out} there and {back} back, in" if sum(found) else "and copies nothing, in"
    assert "zerofx.AdamW steps on the host" in str(prediction) and said in str(prediction)


def test_a_printed_graph_says_what_is_on_the_host(fake_world: Any) -> None:
    fake_world(2)
    with staged():
        half = zerofx.Offload(optimizer="cpu", groups=["front", "head"])
        model = zerofx.compile(Net(), groups=EACH_LAYER, stage=3, executor="eager", offload=half)
    model(torch.ones(2, 91))
    (record,) = zerofx.graphs(model)
    assert "  on host  optimizer state of 2 groups" in str(record.forward).splitlines()


def test_a_plan_has_moments_on_the_host_and_what_a_step_copies(fake_world: Any) -> None:
    plain, there = (zerofx.plan(Net(), world_size=2, offload=offload) for offload in (None, "cpu"))
    for one, other in zip(plain.stages, there.stages, strict=True):
        assert other.files is not None and other.passing == 0
        moved = float(one.memory.moments) if one.stage else 0.0
        assert float(other.files.at_rest) == moved == float(one.memory.total) - float(other.memory.total)
        assert float(other.files.per_step) == 1.5 * moved  # a gradient, a weight out and a weight back, for two moments
    assert "on the host" in str(there) and "to and from it" in str(there) and "on disk" not in str(there)
    with pytest.raises(ValueError, match="says nothing without a folder in offload="):
        zerofx.plan(Net(), world_size=2, offload="cpu", disk_bandwidth=1e9, bandwidth=1e9)
    with pytest.raises(ValueError, match=r'host_bandwidth=1000000000.0 says nothing without offload="cpu"'):
        zerofx.plan(Net(), world_size=2, offload="/x", host_bandwidth=1e9, bandwidth=1e9)
    low = zerofx.plan(Net().bfloat16(), world_size=2, offload="cpu", stages=[3]).stages[0]
    assert low.files is not None and float(low.files.at_rest) == 3 * float(low.files.per_step)  # 12 bytes, and 2 + 2


def copied(stage: int, offload: zerofx.Offload, micro_batches: int) -> int:
    """Bytes that the second step copies between device and host."""
    with staged():
        options: dict[str, Any] = {
            "stage": stage,
            "executor": "eager",
            "memory_budget": math.inf if stage == 3 else None,
        }
        model = zerofx.compile(Net(), groups=EACH_LAYER, offload=offload, **options)
        step = zerofx.AdamW(model.parameters())
        for _ in range(2):
            (staging,) = {group.home.staging for group in groups_of(model)}
            assert staging is not None
            before = staging.brought + staging.taken
            for _ in range(micro_batches):
                model(torch.ones(2, 91)).sum().backward()
            step.step()
            step.zero_grad()
        return staging.brought + staging.taken - before


@pytest.mark.parametrize(
    ("stage", "offload", "k"),
    [(2, GRADIENTS, 1), (3, WEIGHTS, 2), (3, ALL, 3), slow(1, GRADIENTS, 3), slow(3, GRADIENTS, 2), slow(3, ALL, 1)],
)
def test_a_plan_has_what_a_step_copies(fake_world: Any, stage: int, offload: zerofx.Offload, k: int) -> None:
    fake_world(2)
    (plan,) = zerofx.plan(
        Net(), world_size=2, groups=EACH_LAYER, offload=offload, stages=[stage], micro_batches=k
    ).stages
    assert plan.files is not None
    kept = float(plan.files.forward)  # backward reads what forward has left gathered
    assert float(plan.files.per_step) - kept == pytest.approx(copied(stage, offload, k), rel=0.01)
    without = zerofx.plan(Net(), world_size=2, groups=EACH_LAYER, stages=[stage]).stages[0]
    assert float(plan.files.at_rest) == float(without.memory.total) - float(plan.memory.total)


@pytest.mark.parametrize(
    ("stage", "offload"), [(3, ALL), (2, GRADIENTS), (2, zerofx.Offload("cpu")), slow(3, WEIGHTS), slow(3, GRADIENTS)]
)
def test_where_copies_take_longest_a_plan_takes_as_long_as_what_is_predicted(
    fake_world: Any, stage: int, offload: zerofx.Offload
) -> None:
    """Within a tenth: of 16 groups the last stays gathered, and the first gradient leaves when its weights came."""
    fake_world(2)
    options: dict[str, Any] = {"groups": EACH_LAYER, "offload": offload}
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(16)]
    net, x = torch.nn.Sequential(*layers), torch.ones(2, 64)
    rates = {"bandwidth": 1e15, "flops": 1e15, "tokens": 2, "memory_bandwidth": 1e15, "host_bandwidth": 1e6}
    made = zerofx.plan(net, world_size=2, stages=[stage], **rates, **options)
    with staged():
        model = zerofx.compile(net, stage=stage, executor="eager", **options)
        model(x).sum().backward()
        found = zerofx.predict(model, zerofx.Rates(1e15, 1e15, 1e15, host_copy_bytes_per_s=1e6))
    (planned,) = made.stages
    assert planned.time is not None and planned.files is not None and found.time_s is not None
    assert float(planned.time.step) == pytest.approx(found.time_s, rel=0.1, abs=1e-6)
    assert float(planned.time.optimizer) == pytest.approx(found.optimizer_s, rel=0.01, abs=1e-6)
    assert float(planned.time.whole) > 0.1 and "1.0 MB/s each way to the host" in str(made)
    if offload == ALL:  # both ways at once
        assert float(planned.time.step) < 0.8 * float(planned.files.per_step) / 1e6


def test_an_optimizer_that_would_compute_on_the_device_is_refused(fake_world: Any) -> None:
    fake_world(2)
    with staged():
        model, step = sharded("cpu", "torch AdamW")
        said = "AdamW over group 'front', whose optimizer state is in the host's memory"
        with pytest.raises(TypeError, match=said):
            give(model, step, 0)
        with pytest.raises(TypeError, match=said), zerofx.step_in_backward(step):
            pass


def test_what_is_not_built_on_a_gpu_is_refused_by_name() -> None:
    cuda = torch.device("cuda")
    layouts = [layout for layout, _ in checks.plan_groups(Net(), 2, EACH_LAYER)]
    for built in (
        zerofx.Offload(optimizer="cpu", fraction=0.5),
        zerofx.Offload(activations="cpu"),
        zerofx.Offload(optimizer="cpu", activations="cpu"),
        *(WEIGHTS, GRADIENTS, ALL),
    ):
        checks.check_offload(built, layouts, cuda)
    for offload in (
        zerofx.Offload(optimizer="/tmp/x"),
        zerofx.Offload(activations="/tmp/x"),
    ):
        with pytest.raises(ValueError, match="files are built for the CPU alone so far"):
            checks.check_offload(offload, layouts, cuda)


def test_without_its_home_the_option_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "HOMES", [home for home in HOMES if not home.hosts])
    layouts = [layout for layout, _ in checks.plan_groups(Net(), 2, EACH_LAYER)]
    with pytest.raises(ValueError, match=r"no such home \(state/on_host.py\)"):
        checks.check_offload(zerofx.Offload(optimizer="cpu"), layouts, torch.device("cuda"))


def test_of_a_model_on_the_cpu_nothing_moves(fake_world: Any) -> None:
    fake_world(2)
    with pytest.warns(UserWarning, match="the host's memory is where their state is already"):
        model = zerofx.compile(Net(), groups=EACH_LAYER, stage=3, offload=ALL, **EAGER)
    assert not any(group.home.away or group.home.hosts for group in groups_of(model))


class Captured(AtOnce):
    captured = True


def test_inside_of_a_captured_graph_they_are_refused(fake_world: Any) -> None:
    fake_world(2)
    said = r'zerofx.Offload\({}="cpu"\) inside of a CUDA graph that is captured: the optimizer steps on the host'
    for option, offload in (("weights", WEIGHTS), ("gradients", GRADIENTS)):
        with staged(Captured):
            model = zerofx.compile(Net(), groups=EACH_LAYER, stage=3, offload=offload, **EAGER)
            with pytest.raises(RuntimeError, match=said.format(option)):
                model(torch.ones(2, 91)).sum().backward()


class Full(AtOnce):
    def pinned(self, nbytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")


def test_a_host_that_can_pin_nothing_is_an_error_and_nothing_has_changed(fake_world: Any) -> None:
    fake_world(2)
    net = Net()
    with staged(Full), pytest.raises(RuntimeError, match="offload= on rank 0: CUDA error: out of memory"):
        zerofx.shard(net, groups=EACH_LAYER, offload="cpu")
    assert all(type(p) is torch.nn.Parameter for p in net.parameters())
