"""`partition_activations`: the same losses, bit for bit, with parts saved of what tensor-parallel ranks have alike."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.memory import allocated_peak
from tests.models import MLP
from tests.slow import quick_if
from tests.test_foreign_dimensions import Copy, Sum
from zerofx.features.partition_activations.alike import Alike
from zerofx.features.partition_activations.facts import saved_parts

WIDTH, ROWS = 66, 128  # 66: a part of three ranks ends within a row; 128 x 66 numbers of 16 bits are 16.9 kB


class Layer(nn.Module):
    """A normalisation that all ranks have, and two products that are split."""

    def __init__(self, parts: int, group: str, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 96 // parts), nn.Linear(96 // parts, WIDTH, bias=False)
        self.group, self.dropout = group, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(torch.tanh(self.up(Copy.apply(self.norm(x), self.group))))
        return x + F.dropout(Sum.apply(h, self.group), self.dropout)


class Net(nn.Module):
    """Layers between two that all ranks have; ``adapted``: each rank's own matrix, which begins as zeros on all."""

    def __init__(
        self, parts: int, group: str, dropout: float = 0, checkpointed: bool = False, is_loss: bool = True
    ) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Layer(parts, group, dropout) for _ in range(2))
        self.adapted = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.mixed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.group, self.checkpointed, self.is_loss = group, checkpointed, is_loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        own = torch.tanh(Copy.apply(x, self.group) @ self.adapted)  # zeros everywhere, in the first step
        x = x + Sum.apply(self.mixed(own), self.group)
        return self.head(x).square().mean() if self.is_loss else self.head(x)


SPLIT = ("up", "down", "mixed")


def build(tp: DeviceMesh, **kind: Any) -> Net:
    torch.manual_seed(1 + tp.get_local_rank())
    net = Net(tp.size(), tp.get_group().group_name, **kind)
    torch.manual_seed(9)
    for name, module in net.named_modules():
        if hasattr(module, "reset_parameters") and name.rpartition(".")[2] not in SPLIT:
            module.reset_parameters()
    return net


@dataclass
class Run:
    """Losses, the whole weights that all ranks have, what was allocated at most, and what was saved."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    peak: int
    saved: int
    model: Any


def train(mesh: DeviceMesh, parts: bool, kind: dict[str, Any], options: dict[str, Any]) -> Run:
    dp, tp = mesh["dp"], mesh["tp"]
    model = build(tp, **kind)
    if parts:
        options = {**options, "partition_activations": tp}
    zerofx.compile(model, mesh=dp, groups=zerofx.Grouping(min_bytes=0), **options)
    optimizer, losses, peak, saved = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), [], 0, 0
    torch.manual_seed(5 + dist.get_rank())  # of dropout: each rank draws its own
    for step in range(3):
        x = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(step))[dp.get_local_rank()]

        def both(x: torch.Tensor = x) -> None:
            nonlocal saved
            loss = model(x)
            saved = zerofx.memory_summary(model).nbytes["activations"]
            loss.backward()
            losses.append(loss.item())

        peak = allocated_peak(both) if step == 2 else both() or 0
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, zerofx.full_state_dict(model, rank0_only=False), peak, saved, model)


def would_save(run: Run) -> int:
    """Bytes that forward would save without parts: of memory that is not an input's."""
    (record,) = zerofx.graphs(run.model)
    outputs = record.forward.before.graph.output_node().args[0]
    storages = [outputs[i].meta["val"].untyped_storage() for i in record.forward.context.saved]
    inputs = {n.meta["val"].untyped_storage()._cdata for n in record.forward.before.graph.find_nodes(op="placeholder")}
    return sum({s._cdata: s.nbytes() for s in storages if s._cdata not in inputs}.values())


def in_parts(shape: tuple[int, int], kind: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Both ways; what is told of the parts."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    options = {"executor": "eager", **options}
    whole, parts = (train(mesh, way, kind, dict(options)) for way in (False, True))
    assert parts.losses == whole.losses and len(set(whole.losses)) == 3
    assert all(torch.equal(parts.weights[name], x) for name, x in whole.weights.items())
    (record,) = zerofx.graphs(parts.model)
    context = record.forward.context
    said = ["gather_saved"] if saved_parts(context) else []
    return {
        "parts": [(part.name, part.nbytes) for part in saved_parts(context).values()],
        "spared": sum(part.nbytes - part.numel_of_one * part.dtype.itemsize for part in saved_parts(context).values()),
        "counted": parts.saved,
        "whole": would_save(parts),
        "peaks": (whole.peak, parts.peak),
        "printed": str(record),
        "explained": "".join(
            record.explain(words) for words in [part.name for part in saved_parts(context).values()] + said
        ),
        "predicted": [zerofx.predict(run.model) for run in (whole, parts)] if dist.get_rank() == 0 else None,
    }


@quick_if(lambda shape: shape == (1, 3))
@pytest.mark.parametrize("shape", [(2, 2), (1, 3)])
def test_a_step_is_the_same_bit_for_bit_and_what_all_have_alike_is_saved_in_parts(
    make_workers: Callable[[int], Any], shape: tuple[int, int]
) -> None:
    ranks = make_workers(math.prod(shape)).run(in_parts, shape, {}, stage=3, timeout=120)
    found = ranks[0]
    # What enters each norm, each pair of products, the adapter and the head.
    assert len(found["parts"]) == 6 and {nbytes for _, nbytes in found["parts"]} == {4 * ROWS * WIDTH}
    for rank in ranks:
        assert rank["parts"] == found["parts"]
        assert rank["counted"] == rank["whole"] - rank["spared"]
        assert rank["peaks"][1] < rank["peaks"][0]
    if shape == (2, 2):  # as backward begins, one is in use and one under way; with three parts the peak is elsewhere
        assert found["peaks"][1] <= found["peaks"][0] - found["spared"] + 2 * 4 * ROWS * WIDTH
    whole, parts = found["predicted"]
    assert parts.peak_bytes < whole.peak_bytes
    assert parts.wire_bytes - whole.wire_bytes == found["spared"]
    assert f"6 values of {found['parts'][0][1] * 6 / 1e3:.1f} kB saved in {shape[1]} parts" in found["printed"]
    explained = found["explained"]
    assert "made by  partition_saved" in explained and "before the wait for the one before" in explained
    assert f"a part is saved: {shape[1]} tensor-parallel ranks have it alike" in explained


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"stage": 0}),
    ({}, {"stage": 1}),
    ({}, {"stage": 2}),
    ({"dropout": 0.1}, {"stage": 3}),
    ({"checkpointed": True}, {"stage": 3}),
    ({}, {"stage": 3, "activation_budget": 0.6}),
    ({}, {"stage": 3, "mixed_precision": zerofx.MixedPrecision(torch.bfloat16)}),
    ({}, {"stage": 3, "executor": "inductor"}),
    ({}, {"stage": 2, "executor": "inductor"}),
    ({}, {"stage": 0, "executor": "inductor"}),
    ({"checkpointed": True}, {"stage": 3, "executor": "inductor"}),
    ({"dropout": 0.1}, {"stage": 1, "executor": "inductor", "activation_budget": 0.5}),
    ({}, {"stage": 3, "executor": "inductor", "mixed_precision": zerofx.MixedPrecision(torch.bfloat16)}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_so_it_is_with_every_stage_and_option(
    make_workers: Callable[[int], Any], kind: dict[str, Any], options: dict[str, Any]
) -> None:
    ranks = make_workers(4).run(in_parts, (2, 2), kind, timeout=250, **options)
    found = ranks[0]
    assert all(rank["parts"] == found["parts"] for rank in ranks)
    if "dropout" in kind:  # each rank draws its own: nothing behind that is alike, but for what an all-reduce brings
        assert all(name.startswith("wait_tensor") for name, _ in found["parts"])
    else:
        assert found["parts"]
    # With mixed precision casts of weights would be saved, too: backward makes them anew.
    if "mixed_precision" not in options and found["parts"]:
        assert found["counted"] == found["whole"] - found["spared"]


class Twice(nn.Module):
    """One weight, in two graphs: what the first computes is alike, what the second does is each rank's own."""

    def __init__(self, own: int, group: str) -> None:
        super().__init__()
        self.weight, self.own, self.group = nn.Parameter(torch.eye(WIDTH)), own, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x @ self.weight).square()
        torch._dynamo.graph_break()
        own = torch.tanh(Copy.apply(x, self.group) @ self.weight) * self.own
        return Sum.apply(own, self.group).square().mean()


def compiled(mesh: DeviceMesh, **kind: Any) -> nn.Module:
    return zerofx.compile(
        build(mesh["tp"], **kind), mesh=mesh["dp"], executor="eager", partition_activations=mesh["tp"]
    )


def names(record: Any) -> list[str]:
    return [part.name for part in saved_parts(record.forward.context).values()]


def told() -> dict[str, Any]:
    """On one tensor-parallel dimension: a batch that differs, a gradient that does; refusals."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    rank, found = dist.get_rank(), {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = compiled(mesh)
        model(torch.randn(ROWS, WIDTH) + rank).backward()
    found["warned"] = [str(w.message) for w in caught if "partition_activations" in str(w.message)]
    found["of other batches"] = names(zerofx.graphs(model)[0])
    model, x = compiled(mesh, is_loss=False), torch.ones(ROWS, WIDTH)
    try:
        (model(x) * (1 + rank)).sum().backward()
    except RuntimeError as e:
        found["gradient"] = str(e)
    found["names"] = names(zerofx.graphs(model)[0])
    (model(x) * 2).sum().backward()  # once is asked, and this is right
    torch.manual_seed(0)
    twice = Twice(1 + rank, mesh["tp"].get_group().group_name)
    zerofx.compile(twice, mesh=mesh["dp"], executor="eager", partition_activations=mesh["tp"])
    try:
        twice(x)
    except Exception as e:
        found["twice"] = str(e)
    for what in (3, "nowhere", mesh["tp"]):
        with pytest.raises(ValueError, match=r"^partition_activations") as error:
            zerofx.compile(MLP(), partition_activations=what)
        found[str(what)[:7]] = str(error.value)
    return found


def test_what_differs_is_told(workers2: Any) -> None:
    first, second = workers2.run(told, timeout=200)
    (warning,) = first["warned"]
    assert "argument 0 of shape (128, 66) differs between the ranks [0, 1]" in warning and not second["warned"]
    assert first["of other batches"] == []
    assert "the gradient of an output that the ranks [0, 1] have alike, differs" in first["gradient"]
    assert first["gradient"] == second["gradient"]
    assert "the gradient of 'weight' differs between the ranks in one graph" in first["twice"]
    assert "differs between the ranks in one graph" in second["twice"]
    assert len(first["names"]) == 6
    assert "expected a DeviceMesh of one dimension, a process group" in first["3"]
    assert "is in no process group of that name" in first["nowhere"]
    assert "of which [0, 1] share the training of this module" in first["DeviceM"]


def within_memory(shape: tuple[int, int]) -> list[dict[str, Any]]:
    """At the least `memory` that is possible, and at what a step takes in parts that has memory for all."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    wanted = train(mesh, True, {}, {"executor": "eager"})

    def run(parts: bool, nbytes: int) -> Any:
        return train(mesh, parts, {}, {"executor": "eager", "memory": zerofx.Memory(nbytes, 1)})

    def forward(run: Any) -> Any:
        return zerofx.graphs(run.model)[0].forward

    def peak(run: Any) -> int:
        """The least of several steps: gloo's threads may hold a buffer for a moment when it has been waited for."""
        x, peaks = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(9)), []
        for _ in range(5):
            peaks.append(allocated_peak(lambda: run.model(x).backward()))
            run.model.zero_grad()
        return min(peaks)

    with pytest.raises(Exception, match="is too small: a step needs at least") as refused:
        run(True, 1)
    least = int(str(refused.value).partition("at least ")[2].partition(" bytes")[0].replace(",", ""))
    most, whole = (forward(run(parts, 10**9)).division.peak_bytes for parts in (True, False))
    found = []
    for nbytes in (least, most):
        tried = run(True, nbytes)
        assert tried.losses == wanted.losses
        assert all(torch.equal(tried.weights[name], x) for name, x in wanted.weights.items())
        found.append(
            {
                "budget": nbytes,
                "predicted": forward(tried).division.peak_bytes,
                "in step": sum(forward(tried).division.peak.values()),
                "measured": peak(tried),
                "parts": len(saved_parts(forward(tried).context)),
                "whole": whole,
            }
        )
    return found


@pytest.mark.slow
def test_memory_counts_parts_as_what_they_take(make_workers: Callable[[int], Any]) -> None:
    for least, most in make_workers(2).run(within_memory, (1, 2), timeout=250):
        assert least["budget"] < most["budget"] < most["whole"]
        assert least["parts"] < most["parts"]
        for at in (least, most):
            assert at["predicted"] <= at["budget"]
            assert at["measured"] <= at["in step"]
            assert at["in step"] == pytest.approx(at["measured"], rel=0.03)


def test_tensor_parallel_ranks_that_divide_their_memory_differently_are_refused() -> None:
    class Ranks:
        all_gathered = staticmethod(lambda mine: [mine, mine + " 1"])
        __str__ = staticmethod(lambda: "ranks [0, 1]")  # type: ignore[assignment]

    one = Alike.__new__(Alike)
    one.ranks = Ranks()  # type: ignore[assignment]
    said = r"memory= with partition_activations: the ranks \[0, 1\] have divided their bytes differently"
    with pytest.raises(RuntimeError, match=said):
        one.agree("[a, b] 100")


def test_it_goes_neither_with_files_nor_in_a_dry_run() -> None:
    with pytest.raises(ValueError, match="with partition_activations=: what is saved in parts does not go to a file"):
        zerofx.compile(MLP(), offload=zerofx.Offload(activations="scratch"), partition_activations="tp")
    with pytest.raises(ValueError, match="partition_activations= in a dry run: there are no processes"):
        zerofx.dry_run(MLP(), torch.ones(2, 13), world_size=2, partition_activations="tp")
