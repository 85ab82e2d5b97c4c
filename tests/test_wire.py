"""Codes on the wire: every rank computes with what was sent, and sends no more bytes than the code says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zerofx
from tests.slow import quick_if, slow
from tests.workers import Workers
from zerofx.model.layout import BLOCKED_NUMEL

CODES = zerofx.Wire("int8", "int8", stochastic=False)
SMALL = zerofx.Wire("int8", "int4")
FEEDBACK = zerofx.Wire("int8", "int4", error_feedback=True)
INT8_GRADIENTS = zerofx.Wire(None, "int8")
CHANGES = zerofx.Wire("int4", "int4")
EACH_LAYER = zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0)


class Net(nn.Module):
    """Matrices that travel in codes, and biases, a norm and a small matrix that travel as they are."""

    def __init__(self, dim: int = 72) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front, self.norm, self.small = nn.Linear(20, dim), nn.LayerNorm(dim), nn.Linear(dim, 3)
        self.deep = nn.Sequential(nn.Linear(dim, 2 * dim), nn.Tanh(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.front(x).tanh()
        return F.mse_loss(self.small(self.norm(h + self.deep(h))), x[:, :3])


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def train(wire: zerofx.Wire | None, steps: int = 4, clip: float | None = 1.0, **options: Any) -> list[torch.Tensor]:
    """Losses, and the whole weights after them."""
    options = {"executor": "eager", "groups": EACH_LAYER, **options}
    model = zerofx.compile(Net(), wire=wire, **options)
    optimizer = zerofx.AdamW(model.parameters(), lr=0.05, max_grad_norm=clip)
    losses = []
    for step in range(steps):
        with zerofx.no_sync(model):
            model(batch(step, dist.get_rank())).backward()
        losses.append(model(batch(step, 10 + dist.get_rank())))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [x.detach() for x in [*losses, *(p.full_tensor() for p in model.parameters())]]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(x.equal(y) and x.isfinite().all() for x, y in zip(a, b, strict=True))


# ---- the numbers ----------------------------------------------------------------------------------------------------


def rounded(x: torch.Tensor, block: int = 256) -> torch.Tensor:
    """``x`` in int8, by the formula and in 64 bits; a small one as it is."""
    if x.numel() < BLOCKED_NUMEL:
        return x
    flat = F.pad(x.double().flatten(), (0, -x.numel() % block)).view(-1, block)
    step = (flat.abs().amax(1, keepdim=True) / 127).clamp_min(1e-300)
    return ((flat / step).round() * step).flatten()[: x.numel()].view(x.shape).to(x.dtype)


def one_step_by_hand(rank: int, ranks: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss, and the gradients as ``rank`` adds them up: its own exact, the others' in int8."""
    sums: list[torch.Tensor] = []
    loss = torch.zeros(())
    for other in range(ranks):
        model = Net()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(rounded(p))
        value = model(batch(0, other))
        value.backward()
        if other == rank:
            loss = value.detach()
        grads = [p.grad if other == rank else rounded(p.grad) for p in model.parameters()]  # type: ignore[arg-type]
        sums = grads if not sums else [a + b for a, b in zip(sums, grads)]  # type: ignore[assignment]
    return loss, [g / ranks for g in sums]


def one_step(stage: int, executor: str) -> list[float]:
    """How far loss and gradients are from those by hand; of gradients, the share of elements that are elsewhere."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = zerofx.compile(Net(), stage=stage, wire=CODES, executor=executor, groups=EACH_LAYER)
    loss = model(batch(0, rank))
    loss.backward()
    wanted, gradients = one_step_by_hand(rank, ranks)
    off = [abs(float(loss.detach() - wanted)) / abs(float(wanted))]
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        piece = p._group.layout.piece(p._slot, rank)
        mine = gradient.flatten().narrow(0, piece.in_parameter, piece.length)
        if piece.length:
            away = (p.grad.to_local() - mine).abs() > 1e-5 * gradient.abs().max()
            off.append(float(away.float().mean()))
    return off


@quick_if(lambda stage, executor: executor == "eager" and stage > 1)
@pytest.mark.parametrize(("stage", "executor"), [(1, "eager"), (2, "eager"), (3, "eager"), (3, "inductor")])
def test_a_step_is_that_of_rounded_weights_and_of_the_others_rounded_gradients(
    workers2: Workers, stage: int, executor: str
) -> None:
    for off in workers2.run(one_step, stage, executor):
        assert off[0] < 1e-5
        assert max(off[1:]) < 1e-3  # a number between two codes may fall to either, in 32 bits


# ---- what a step has changed ----------------------------------------------------------------------------------------


def in_int4(change: torch.Tensor) -> torch.Tensor:
    """By the formula and in 64 bits, in blocks of 256."""
    flat = F.pad(change.double().flatten(), (0, -change.numel() % 256)).view(-1, 256)
    step = (flat.abs().amax(1, keepdim=True) / 7).clamp_min(1e-300)
    return ((flat / step).round() * step).flatten()[: change.numel()].view(change.shape)


def replicas(model: nn.Module) -> list[torch.Tensor]:
    """What the model computes with, of each parameter."""
    found = []
    for p in model.parameters():
        p._group.weights.refresh()
        p._group.weights.land()
        slot, whole = p._slot, torch.ops._c10d_functional.wait_tensor(p._group.weights.replica)
        found.append(whole[slot.offset : slot.end].view(slot.shape).clone())
    return found


def changes(stage: int, dtype: torch.dtype | None) -> tuple[float, float, bool, list[torch.Tensor]]:
    """Of replicas' elements the share that is not as by hand, and not as near to the weights as the code promises.

    And whether what is small is exact, and the replicas. A sum in 16 bits is off by a rounding more.
    """
    rounding = 0.0 if dtype is None else 2.0**-8
    precision = None if dtype is None else zerofx.MixedPrecision(dtype, torch.float32)
    options: Any = {"stage": stage, "executor": "eager", "groups": EACH_LAYER, "mixed_precision": precision}
    model = zerofx.compile(Net(), wire=CHANGES, **options)
    optimizer = zerofx.AdamW(model.parameters(), lr=0.01)
    off, away, exact, before = 0.0, 0.0, True, replicas(model)
    for step in range(5):
        model(batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        now, weights = replicas(model), [p.full_tensor().detach() for p in model.parameters()]
        for old, new, weight in zip(before, now, weights, strict=True):
            if weight.numel() < BLOCKED_NUMEL:
                exact &= new.equal(weight.to(new.dtype))
                continue
            change = weight.double() - old.double()
            allowed = rounding * new.double().abs() + 1e-3 * change.abs().max()
            by_hand = (new.double() - old.double() - in_int4(change)).abs() <= allowed
            off = max(off, float((~by_hand).double().mean()))
            near = (new.double() - weight).abs() <= allowed + change.abs().max() / 14
            away = max(away, float((~near).double().mean()))
        before = now
    return off, away, exact, before


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), [(1, None), (2, torch.bfloat16)], ids=str)
def test_a_refresh_sends_the_codes_of_what_changed_since_the_last(
    workers3: Workers, stage: int, dtype: torch.dtype | None
) -> None:
    found = workers3.run(changes, stage, dtype)
    for off, away, exact, replica in found:
        # A number between two codes may fall to either. Where a change is of 16 bits, so are 7 · 2 / 2⁸ of all.
        assert off < (1e-3 if dtype is None else 0.055) and away == 0 and exact
        assert equal(replica, found[0][3])


def written(how: str) -> bool:
    """Whether the model computes with the exact weights after somebody else than a step has written them."""
    model = zerofx.compile(Net(), stage=2, executor="eager", groups=EACH_LAYER, wire=CHANGES)
    optimizer = zerofx.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        model(batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            replicas(model)
    if how == "between steps":  # and a step behind it
        with torch.no_grad():
            model.deep[0].weight.mul_(2)
        model(batch(2, dist.get_rank())).backward()
        with torch.no_grad():
            model.deep[0].weight.mul_(2)
        optimizer.step()
    elif how == "loaded":
        model.load_state_dict({k: 3 * v for k, v in Net().state_dict().items()})
    else:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
    exact = [p.full_tensor().detach() for p in model.parameters()]
    near = [new.equal(weight) for new, weight in zip(replicas(model), exact, strict=True)]
    names = [name for name, _ in model.named_parameters()]
    return near[names.index("deep.0.weight")] and (how == "between steps" or all(near))


@quick_if(lambda how: how == "loaded")
@pytest.mark.parametrize("how", ["between steps", "loaded", "in place"])
def test_what_no_step_has_written_is_sent_as_it_is(workers2: Workers, how: str) -> None:
    assert workers2.run(written, how) == [True, True]


def in_backward(optimizer: str, executor: str) -> bool:
    """Whether a step in backward gives the numbers of one behind it."""
    made, found = {"zerofx": zerofx.AdamW, "torch": torch.optim.SGD}[optimizer], []
    for inside in (True, False):
        model = zerofx.compile(Net(), stage=2, executor=executor, groups=EACH_LAYER, wire=CHANGES)
        steps, losses = made(model.parameters(), lr=0.01), []
        for step in range(3):
            losses.append(model(batch(step, dist.get_rank())))
            if inside:
                with zerofx.step_in_backward(steps):
                    losses[-1].backward()
            else:
                losses[-1].backward()
                steps.step()
                steps.zero_grad()
        found.append([x.detach() for x in [*losses, *replicas(model)]])
    return equal(*found)


@quick_if(lambda optimizer, executor: (optimizer, executor) == ("zerofx", "eager"))
@pytest.mark.parametrize(("optimizer", "executor"), [("zerofx", "eager"), ("torch", "eager"), ("zerofx", "inductor")])
def test_changes_made_in_backward_are_sent_as_those_behind_it(workers2: Workers, optimizer: str, executor: str) -> None:
    assert workers2.run(in_backward, optimizer, executor) == [True, True]


# ---- every stage, any number of ranks -------------------------------------------------------------------------------


def stages_agree(wire: zerofx.Wire) -> bool:
    first = train(wire, stage=3)
    return all(equal(train(wire, **options), first) for options in ({"stage": 1}, {"stage": 2}, {"stage": 3}))


@quick_if(lambda wire: wire.weights == "bf16")
@pytest.mark.parametrize(
    "wire",
    [
        SMALL,
        FEEDBACK,
        zerofx.Wire("bf16", "bf16", block=32),
        zerofx.Wire("fp8", "fp8", block=64),
        zerofx.Wire(None, "int8"),
    ],
    ids=str,
)
def test_every_stage_computes_the_same_bits(workers2: Workers, wire: zerofx.Wire) -> None:
    assert workers2.run(stages_agree, wire) == [True, True]


@pytest.mark.slow
def test_all_ranks_have_the_same_weights_and_the_exact_ones_are_kept(workers3: Workers) -> None:
    found = workers3.run(train, SMALL)
    plain = workers3.run(train, None)
    for ranks in (found, plain):
        assert all(equal(rank[4:], ranks[0][4:]) for rank in ranks)
    for coded, exact in zip(found[0], plain[0], strict=True):
        assert 0 < (coded - exact).norm() / exact.norm() < 0.5


def outputs() -> torch.Tensor:
    model = zerofx.compile(Net(), stage=3, executor="eager", wire=SMALL)
    with torch.no_grad():
        return model(batch(0, 0))


def test_any_number_of_ranks_sends_the_same_codes(workers2: Workers, workers3: Workers) -> None:
    first, *others = workers2.run(outputs) + workers3.run(outputs)
    assert all(first.equal(other) for other in others)


OTHER_WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kept gathered": ({}, {"memory_budget": float("inf")}),
    "one copy, gradients alone": ({"wire": INT8_GRADIENTS}, {"wire": INT8_GRADIENTS, "one_copy": True}),
    "a second process group": ({}, {"reduce_group": "reductions"}),
    "16 bits": (
        {"mixed_precision": zerofx.MixedPrecision(torch.bfloat16, torch.float32), "stage": 2},
        {"mixed_precision": zerofx.MixedPrecision(torch.bfloat16, torch.float32), "stage": 3},
    ),
}


def another_way(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if other.get("reduce_group"):
        other = {"reduce_group": dist.new_group(list(range(dist.get_world_size())))}
    return equal(train(**{"wire": SMALL, **one}), train(**{"wire": SMALL, **other}))


@quick_if(lambda way: way == "one copy, gradients alone")
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_codes_and_other_options_do_not_touch_each_other(workers2: Workers, way: str) -> None:
    assert workers2.run(another_way, *OTHER_WAYS[way]) == [True, True]


class Tabled(Net):
    """A table that is only looked up, in front."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.table((x[:, 0].abs() * 100).long() % 500))


def looks_up() -> tuple[float, bool]:
    model = zerofx.compile(Tabled(), stage=3, executor="eager", wire=CODES, groups=EACH_LAYER, lookups=True)
    loss = model(batch(0, dist.get_rank()))
    loss.backward()
    plain = Tabled()
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(p if name == "table.weight" else rounded(p))
    (record,) = zerofx.graphs(model)
    rows = {n.meta["zerofx"].kind for n in record.forward.before_lower().graph.nodes if "zerofx" in n.meta}
    return abs(float(loss.detach() - plain(batch(0, dist.get_rank())))), {"rows", "quantize"} <= rows


def test_rows_of_tables_travel_as_they_are_beside_layers_in_codes(workers2: Workers) -> None:
    for off, both in workers2.run(looks_up):
        assert off < 1e-6 and both


def leaf_forward() -> bool:
    losses = []
    for leaves in (None, ["deep"]):
        model = zerofx.compile(Net(), stage=3, executor="eager", wire=SMALL, groups=EACH_LAYER, leaf_modules=leaves)
        losses.append(model(batch(0, dist.get_rank())))
        losses[-1].backward()
    return losses[0].equal(losses[1])


@pytest.mark.slow
def test_a_leaf_module_is_gathered_in_codes_too(workers2: Workers) -> None:
    assert workers2.run(leaf_forward) == [True, True]


def steps_inside() -> bool:
    found = []
    for inside in (False, True):
        model = zerofx.compile(Net(), stage=2, executor="eager", wire=CODES, groups=EACH_LAYER)
        optimizer = zerofx.AdamW(model.parameters(), lr=0.05)
        for step in range(3):
            x = batch(step, dist.get_rank())
            if inside:
                with zerofx.step_in_backward(optimizer):
                    model(x).backward()
            else:
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([p.full_tensor() for p in model.parameters()])
    return equal(*found)


def test_groups_that_are_updated_in_backward_are_refreshed_in_codes(workers2: Workers) -> None:
    assert workers2.run(steps_inside) == [True, True]


def goes_on(folder: str, wire: zerofx.Wire) -> bool:
    def run(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            model(batch(step, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()

    def fresh() -> tuple[Any, Any]:
        model = zerofx.compile(Net(), stage=2, executor="eager", wire=wire)
        return model, zerofx.AdamW(model.parameters(), lr=0.05)

    model, optimizer = fresh()
    run(model, optimizer, range(2))
    zerofx.save(folder, model, optimizer)
    run(model, optimizer, range(2, 4))
    again, its_optimizer = fresh()
    assert set(zerofx.load(folder, again, its_optimizer)) == {"step", "path"}
    run(again, its_optimizer, range(2, 4))
    return equal([p.full_tensor() for p in model.parameters()], [p.full_tensor() for p in again.parameters()])


@pytest.mark.parametrize("wire", [slow(SMALL), FEEDBACK], ids=str)
def test_a_checkpoint_has_the_exact_weights_and_goes_on_with_the_same_bits(
    workers2: Workers, tmp_path: Path, wire: zerofx.Wire
) -> None:
    assert workers2.run(goes_on, str(tmp_path / "step"), wire) == [True, True]


def drops_the_rest(folder: str) -> tuple[int, int]:
    model = zerofx.compile(Net(), stage=3, executor="eager", wire=FEEDBACK)
    model(batch(0, dist.get_rank())).backward()
    kept = zerofx.memory_summary(model).nbytes["cut off"]
    if dist.get_world_size() == 2:
        zerofx.save(folder, model)
    else:
        zerofx.load(folder, model, rng=False)
    return kept, zerofx.memory_summary(model).nbytes["cut off"]


def test_what_was_cut_off_is_dropped_where_another_number_of_ranks_loads(
    workers2: Workers, workers3: Workers, tmp_path: Path
) -> None:
    saved = workers2.run(drops_the_rest, str(tmp_path / "step"))
    assert all(before == after > 0 for before, after in saved)
    assert all(before > 0 == after for before, after in workers3.run(drops_the_rest, str(tmp_path / "step")))


def skips_a_step() -> bool:
    model = zerofx.compile(Net(), stage=3, executor="eager", wire=SMALL, groups=EACH_LAYER)
    optimizer = zerofx.AdamW(model.parameters(), lr=0.05, max_grad_norm=1.0)
    before = [p.full_tensor() for p in model.parameters()]
    x = batch(0, dist.get_rank())
    if dist.get_rank() == 1:
        x[0, 0] = torch.inf
    model(x).backward()
    optimizer.step()
    return not optimizer.grad_norm.isfinite() and equal(before, [p.full_tensor() for p in model.parameters()])


def test_a_gradient_that_is_not_finite_is_seen_through_codes_on_every_rank(workers2: Workers) -> None:
    assert workers2.run(skips_a_step) == [True, True]


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int7"}, r"Wire\(weights='int7'\): expected one of 'bf16', 'fp8', 'int8', 'int4', or None"),
        ({"gradients": "fp4"}, r"Wire\(gradients='fp4'\): expected one of 'bf16', 'fp8', 'int8', 'int4', or None"),
        ({"block": 33}, r"Wire\(block=33\): expected an even number of elements, 32 or more"),
        ({"error_feedback": 1, "gradients": "int8"}, r"Wire\(error_feedback=1\): expected True or False"),
        ({"error_feedback": True}, "of gradients as they are nothing is cut off"),
        ({"error_feedback": True, "gradients": "int4", "stochastic": True}, "Leave one of both out"),
        ({"stochastic": "no"}, r"Wire\(stochastic='no'\): expected True, False or None"),
    ],
)
def test_a_code_that_is_none_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zerofx.Wire(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wire": "int8"}, "wire='int8': expected a zerofx.Wire, such as"),
        ({"wire": CODES, "stage": 0}, "codes cannot be added. Use stage=1"),
        ({"wire": CODES, "one_copy": True}, "no weights travel there. Leave weights= out"),
        ({"wire": CHANGES, "stage": 3}, 'no rank has the weights whole to add that to. Use stage=2, or weights="int8"'),
    ],
)
def test_codes_where_nothing_could_travel_in_them_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zerofx.compile(Net(), **options)


def codes_of_its_own() -> str:
    wire = zerofx.Wire("int8", block=64 if dist.get_rank() else 128)
    try:
        zerofx.compile(Net(), wire=wire)
    except RuntimeError as e:
        return str(e)
    return "nothing"


def test_ranks_with_different_codes_are_refused_everywhere(workers2: Workers) -> None:
    assert all("different models" in found for found in workers2.run(codes_of_its_own))
