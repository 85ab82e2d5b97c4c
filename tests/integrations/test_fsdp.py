"""FSDP2's script with one line changed: the losses of FSDP2, its checkpoints, and errors that say what to write."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import zerofx
from tests.integrations.launched import close, converted, plain, run_script
from tests.slow import quick_if
from tests.workers import Workers
from zerofx.integrations import fsdp
from zerofx.integrations.fsdp import fully_shard

IMPORT = "from torch.distributed.fsdp import fully_shard"
EAGER: Any = {"executor": "eager"}


def changed(executor: str) -> str:
    options = f'functools.partial(z.fully_shard, zerofx={{"executor": "{executor}"}})'
    return converted("fsdp", {IMPORT: f"import functools, zerofx.integrations.fsdp as z; fully_shard = {options}"})


@quick_if(lambda dtype: dtype == "float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_line_changed_trains_clips_and_saves_as_fsdp2(workers2: Workers, dtype: str, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("fsdp2", "zerofx")]
    expected = workers2.run(run_script, plain("fsdp"), folders[0], dtype, timeout=250)
    found = workers2.run(run_script, changed("eager"), folders[1], dtype, timeout=250)
    tolerance = 1e-5 if dtype == "float32" else 2e-3
    close(found, expected, tolerance)
    assert len(found[0]["losses"]) == 20
    for folder in folders[:: 1 if dtype == "float32" else 2]:
        resumed = workers2.run(run_script, changed("eager"), str(tmp_path), dtype, f"{folder}/ten", timeout=250)
        close([one["losses"] for one in resumed], [one["losses"][10:] for one in expected], tolerance)


@pytest.mark.slow
def test_one_line_changed_trains_as_fsdp2_with_inductor(workers2: Workers, tmp_path: Path) -> None:
    text = converted("fsdp", {IMPORT: "from zerofx.integrations.fsdp import fully_shard"})
    expected = workers2.run(run_script, plain("fsdp"), str(tmp_path / "fsdp2"), "float32", timeout=250)
    found = workers2.run(run_script, text, str(tmp_path / "zerofx"), "float32", timeout=280)
    close(found, expected)


def losses_on(shape: tuple[int, ...]) -> list[float]:
    mesh = init_device_mesh("cpu", shape)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, zerofx=EAGER)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        losses.append(model(x).square().mean())
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def test_a_mesh_of_two_dimensions_trains_as_one(make_workers: Any) -> None:
    workers = make_workers(4)
    for found, wanted in zip(workers.run(losses_on, (2, 2)), workers.run(losses_on, (4,)), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def marked(net: nn.Module, **options: Any) -> Any:
    for layer in net.layers:  # type: ignore[union-attr]
        fully_shard(layer, **options)
    return fully_shard(net, zerofx=EAGER, **options)


def check_uses() -> None:
    """What counts as a use of the model, whichever module of it is used."""
    uses = {
        "forward": lambda net: net(torch.ones(1, 6)),
        "parameters": lambda net: list(net.parameters()),
        "a layer's parameters": lambda net: list(net.layers[0].parameters()),
        "state_dict": lambda net: net.state_dict(),
        "load_state_dict": lambda net: net.load_state_dict(Net().state_dict()),
        "a layer's forward": lambda net: net.layers[1](torch.ones(1, 6)),
    }
    for name, use in uses.items():
        net = marked(Net())
        assert not any(isinstance(p, zerofx.ShardedParameter) for p in fsdp.plain_parameters(net))
        use(net)
        assert all(isinstance(p, zerofx.ShardedParameter) for p in net.parameters()), name
        assert not any(m in fsdp._MARKS for m in net.modules())
        assert isinstance(net, Net) and len(list(net.state_dict())) == 8


def test_the_whole_model_is_sharded_when_any_of_it_is_used(workers2: Workers) -> None:
    workers2.run(check_uses)


def check_accumulation(rank_batches: int) -> None:
    torch.manual_seed(0)
    plain_net, net = Net(), Net()
    net.load_state_dict(plain_net.state_dict())
    marked(net)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for i in range(rank_batches):
        net.set_requires_gradient_sync(i == rank_batches - 1)  # type: ignore[operator]
        net(x).square().mean().backward()
        plain_net(x).square().mean().backward()
        assert (next(net.parameters()).grad is None) == (i < rank_batches - 1)
    for p, q in zip(net.parameters(), plain_net.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr]


def test_set_requires_gradient_sync_keeps_gradients_until_the_last_micro_batch(workers2: Workers) -> None:
    workers2.run(check_accumulation, 3)


def check_meta() -> None:
    with torch.device("meta"):
        net = Net()
    marked(net)
    with pytest.raises(RuntimeError, match=r"on the meta device: expected `module\.to_empty\(device=\.\.\.\)`"):
        net.parameters().__next__()
    net.to_empty(device="cpu")
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    first = net(torch.ones(2, 6)).square().mean()
    first.backward()
    optimizer.step()
    assert net(torch.ones(2, 6)).square().mean() < first
    assert all(isinstance(p, zerofx.ShardedParameter) for p in net.parameters())


def test_a_model_on_the_meta_device_is_initialised_by_to_empty(workers2: Workers) -> None:
    workers2.run(check_meta)


def check_late_mark() -> None:
    net = Net()
    fully_shard(net.layers[0], zerofx=EAGER)
    list(net.layers[0].parameters())
    with pytest.raises(ValueError, match=r"sharded already: expected one call for each module, the whole model's last"):
        fully_shard(net)
    with pytest.raises(RuntimeError, match=r"a copy of a ZeroNet that was given to fully_shard: it is not sharded"):
        copy.copy(marked(Net()))(torch.ones(1, 6))


def check_copy() -> None:
    """Of a marked model: that counts as a use. The copy has casts of its own."""
    torch.manual_seed(dist.get_rank())
    net = Net()
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    fully_shard(net.layers[0], mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    fully_shard(net, mp_policy=policy, zerofx=EAGER)
    twin, x = copy.deepcopy(net), torch.ones(2, 6)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    before = net(x)
    assert torch.equal(twin(x), before)
    twin(x).square().mean().backward()
    optimizer.step()
    assert torch.equal(net(x), before) and not torch.equal(twin(x), before)
    with zerofx.unsharded(twin, writeback=False), torch.no_grad():
        assert twin(x).dtype == twin.layers[0](x).dtype == torch.float32


def test_a_copy_of_a_marked_model_is_sharded_alike(workers2: Workers) -> None:
    workers2.run(check_copy)


def test_marks_that_do_not_make_one_model_are_refused(workers2: Workers) -> None:
    workers2.run(check_late_mark)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"shard_placement_fn": print},
            r"shard_placement_fn=.*: expected None\. A rank's part of a weight is a flat",
        ),
        ({"reshard_after_forward": 2}, r"reshard_after_forward=2: expected True, False or None\. To keep a part"),
        ({"offload_policy": CPUOffloadPolicy()}, r"expected OffloadPolicy\(\), for shards are where the model is"),
        ({"zerofx": {"groups": None}}, r"with mixed_precision, groups, mesh or ignored: expected other options"),
        ({"zerofx": {"stage": 5}}, r"fully_shard\(zerofx=\.\.\.\): stage=5"),
    ],
)
def test_what_means_nothing_here_is_refused_with_what_to_write_instead(arguments: dict[str, Any], text: str) -> None:
    net = Net()
    with pytest.raises(ValueError, match=text):
        fully_shard(net, **arguments)
    assert type(net) is Net


def test_containers_without_a_forward_are_refused() -> None:
    with pytest.raises(ValueError, match=r"fully_shard of a ModuleList: expected a module with a forward"):
        fully_shard(Net().layers)
