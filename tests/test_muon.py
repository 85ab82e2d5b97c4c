"""`zerofx.Muon` in one process, on plain tensors: the numbers of torch.optim.Muon and torch.optim.AdamW."""

from __future__ import annotations

import copy
import math
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zerofx
from zerofx.runtime.optim.orthogonalize import orthogonalize, triples_of

needs_torch_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is newer")
SHAPES = [(6, 10), (10, 6), (8, 8), (6, 10), (3, 40)]


class Model(nn.Module):
    """A little of everything."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x) + self.token
        for layer in self.layers:
            h = h + torch.relu(layer(h))
        return F.cross_entropy(self.lm_head(self.norm(h)).flatten(0, 1), x.flatten())


def tensors(shapes: list[tuple[int, ...]], seed: int = 0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def matrices_of(parameters: list[Any]) -> list[dict[str, Any]]:
    return [{"params": parameters, "use_muon": True}]


def train(
    optimizers: list[torch.optim.Optimizer], parameters: list[nn.Parameter], steps: int = 3, seed: int = 1
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()


def model() -> tuple[Model, torch.Tensor]:
    torch.manual_seed(0)
    return Model(), torch.randint(11, (4, 5))


def names_of(optimizer: zerofx.Muon, module: nn.Module) -> list[str]:
    names = {p: name for name, p in module.named_parameters()}
    return [names[p] for group in optimizer.param_groups if group["use_muon"] for p in group["params"]]


@needs_torch_muon
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_matrices_are_those_of_torch(nesterov: bool, adjust: str | None, decay: float) -> None:
    options: dict[str, Any] = dict(lr=0.02, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust, weight_decay=decay)
    # In a batch a product of bfloat16 may be rounded otherwise, which the iteration amplifies.
    for shapes, atol in (([(6, 10), (8, 4), (8, 8)], 0.0), (SHAPES, 0.05 * 0.02)):
        ours, theirs = tensors(shapes), tensors(shapes)
        for seed in range(3):
            train([zerofx.Muon(matrices_of(ours), **options)], ours, seed=seed)
            train([torch.optim.Muon(theirs, **options)], theirs, seed=seed)
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=0.0, atol=atol)


@needs_torch_muon
def test_a_model_is_that_of_two_optimizers() -> None:
    ours, x = model()
    theirs = copy.deepcopy(ours)
    optimizer = zerofx.Muon(ours, lr=0.02, weight_decay=0.1, adamw_lr=1e-2, adamw_weight_decay=0.3, adamw_eps=1e-7)
    inner = {p for layer in theirs.layers for p in [layer.weight]}
    rest = [p for p in theirs.parameters() if p not in inner]
    both = [
        torch.optim.Muon([layer.weight for layer in theirs.layers], lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.3, eps=1e-7),
    ]
    for _ in range(4):
        for module, optimizers in ((ours, [optimizer]), (theirs, both)):
            module.zero_grad()
            module(x).backward()
            for o in optimizers:
                o.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


def test_equal_shapes_are_one_batch() -> None:
    matrices = [torch.randn(6, 10), torch.randn(10, 6), torch.randn(2, 6, 10), torch.randn(5, 5)]
    with unittest.mock.patch("torch.baddbmm", side_effect=torch.baddbmm) as batched:
        with unittest.mock.patch("torch.addmm", side_effect=torch.addmm) as alone:
            results = orthogonalize(matrices)
    assert batched.call_count == 2 * 5
    assert alone.call_count == 2 * 5  # of the one that has no other of its shape
    assert [x.shape for x in results] == [x.shape for x in matrices]
    for matrix, result in zip(matrices, results, strict=True):
        assert torch.equal(orthogonalize([matrix])[0], result)


def test_a_batch_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = [torch.randn(6, 10) for _ in range(5)]
    whole = orthogonalize(matrices)
    monkeypatch.setattr("zerofx.runtime.optim.orthogonalize._BATCH_ON_CPU", 130)
    assert all(torch.equal(a, b) for a, b in zip(orthogonalize(matrices), whole, strict=True))


def test_a_convolution_is_one_matrix() -> None:
    weight = torch.randn(4, 3, 2, 2)
    result = orthogonalize([weight], dtype=torch.float32)[0]
    assert torch.equal(result.flatten(1), orthogonalize([weight.flatten(1)], dtype=torch.float32)[0])


@pytest.mark.parametrize(("coefficients", "least", "most"), [("quintic", 0.47, 1.21), ("polar_express", 0.84, 1.13)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_are_near_1(coefficients: str, least: float, most: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(48, 96), full_matrices=False)
    values = torch.logspace(0, -2, 48)
    values /= values.norm()
    assert values.min() > 1e-3
    result = orthogonalize([(u * values) @ v], coefficients=coefficients, dtype=dtype)[0]
    assert result.dtype == dtype
    found = torch.linalg.svdvals(result.float())
    assert least < found.min() and found.max() < most


def test_coefficients_are_right_between_singular_values() -> None:
    for name, least, most in (("quintic", 0.47, 1.21), ("polar_express", 0.84, 1.13)):
        s = torch.logspace(-3, 0, 10_000, dtype=torch.float64)
        for a, b, c in triples_of(name, 5):
            s = a * s + b * s**3 + c * s**5
        assert least < s.min() and s.max() < most
    s = torch.logspace(-3, 0, 1000, dtype=torch.float64)
    for a, b, c in triples_of("polar_express", 9):  # the last triple is for all that follow
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(s, torch.ones_like(s))


def test_a_matrix_is_left_as_it_is() -> None:
    for dtype in (torch.float32, torch.bfloat16):  # without Nesterov it is the momentum itself
        matrix = torch.randn(5, 7).to(dtype)
        before = matrix.clone()
        orthogonalize([matrix], dtype=dtype)
        assert torch.equal(matrix, before)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("split", [3, [8, 8, 8]])
def test_blocks_are_as_separate_matrices(adjust: Any, split: Any) -> None:
    parts = tensors([(8, 6)] * 3)
    fused = nn.Parameter(torch.cat([p.detach() for p in parts]))
    one = zerofx.Muon([("h.0.qkv.weight", fused)], lr=0.1, adjust_lr_fn=adjust, splits={"*.qkv.weight": split})
    many = zerofx.Muon(matrices_of(parts), lr=0.1, adjust_lr_fn=adjust)
    for seed in range(3):
        train([many], parts, 1, seed)
        fused.grad = torch.cat([p.grad for p in parts if p.grad is not None])
        one.step()
    assert torch.equal(fused, torch.cat(list(parts)))


def test_blocks_of_several_sizes() -> None:
    parts = tensors([(16, 6), (4, 6), (4, 6)])
    fused = nn.Parameter(torch.cat([p.detach() for p in parts]))
    one = zerofx.Muon([("qkv.weight", fused)], lr=0.1, splits={"qkv.weight": [16, 4, 4]})
    train([zerofx.Muon(matrices_of(parts), lr=0.1)], parts, 1)
    fused.grad = torch.cat([p.grad for p in parts if p.grad is not None])
    one.step()
    torch.testing.assert_close(fused, torch.cat(list(parts)), rtol=1e-2, atol=1e-3)  # ratios are rounded to bfloat16


def test_experts_are_as_separate_matrices() -> None:
    parts = tensors([(12, 6)] * 4)
    stacked = nn.Parameter(torch.stack([p.detach() for p in parts]))
    train([zerofx.Muon(matrices_of(parts), lr=0.1)], parts, 1)
    stacked.grad = torch.stack([p.grad for p in parts if p.grad is not None])
    zerofx.Muon([("experts", stacked)], lr=0.1).step()
    assert torch.equal(stacked, torch.stack(list(parts)))


def test_convolutions_of_a_module_are_flat() -> None:
    module = nn.Sequential(nn.Conv1d(4, 6, 3), nn.Conv2d(6, 4, 3))
    optimizer = zerofx.Muon(module, lr=0.1, iteration_dtype=torch.float32, ns_coefficients="polar_express", ns_steps=9)
    before = [p.detach().clone() for p in module.parameters()]
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    for i in (0, 2):
        moved = ((before[i] - list(module.parameters())[i]) / 0.1).detach().flatten(1)
        torch.testing.assert_close(torch.linalg.svdvals(moved), torch.ones(len(moved)), rtol=1e-3, atol=1e-3)


def test_what_goes_where() -> None:
    module, _ = model()
    inner = [f"layers.{i}.weight" for i in range(3)]
    assert names_of(zerofx.Muon(module), module) == inner
    assert names_of(zerofx.Muon(module.named_parameters()), module) == inner
    assert names_of(zerofx.Muon(module, others=["layers.1.*"]), module) == [inner[0], inner[2]]
    assert names_of(zerofx.Muon(module, matrices=["lm_head.*"]), module) == [*inner, "lm_head.weight"]
    assert names_of(zerofx.Muon(module, matrices="lm_head.weight", others="layers.*"), module) == ["lm_head.weight"]


def test_a_tied_head_is_the_embedding() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(8, 11, bias=False)  # comes first, so its name is the parameter's
            self.words = nn.Embedding(11, 8)
            self.words.weight = self.projection.weight
            self.inner = nn.Linear(8, 8)

    module = Named()
    assert names_of(zerofx.Muon(module), module) == ["inner.weight"]
    tied = Model(tied=True)
    assert names_of(zerofx.Muon(tied), tied) == [f"layers.{i}.weight" for i in range(3)]


def test_a_head_that_the_model_names() -> None:
    class Speaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.speak = nn.Linear(8, 8), nn.Linear(8, 11)

        def get_output_embeddings(self) -> nn.Module:
            return self.speak

    module = Speaks()
    assert names_of(zerofx.Muon(module), module) == ["inner.weight"]


def test_groups_say_which_they_are() -> None:
    module, x = model()
    heads = [module.lm_head.weight]
    optimizer = zerofx.Muon(
        [
            {"params": [layer.weight for layer in module.layers], "use_muon": True, "lr": 0.02, "momentum": 0.9},
            {"params": heads, "use_muon": False, "lr": 1e-4, "betas": (0.8, 0.9), "eps": 1e-10, "weight_decay": 0.0},
        ]
    )
    first, second = optimizer.param_groups
    assert (first["lr"], first["momentum"], second["lr"], second["betas"]) == (0.02, 0.9, 1e-4, (0.8, 0.9))
    assert "betas" not in first and "momentum" not in second and "ns_steps" not in second
    module(x).backward()
    optimizer.step()
    assert set(optimizer.state[heads[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(optimizer.state[module.layers[0].weight]) == {"momentum_buffer"}


def test_options_of_a_group_are_for_both_kinds() -> None:
    module, _ = model()
    decayed = [(n, p) for n, p in module.named_parameters() if p.ndim > 1]
    rest = [(n, p) for n, p in module.named_parameters() if p.ndim < 2]
    optimizer = zerofx.Muon(
        [{"params": decayed, "weight_decay": 0.3, "adamw_lr": 0.5}, {"params": rest, "weight_decay": 0.0, "lr": 0.25}],
        lr=0.02,
    )
    found = [(group["use_muon"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(True, 0.02, 0.3), (False, 0.5, 0.3), (False, 0.25, 0.0)]
    assert optimizer.param_groups[2]["param_names"] == [n for n, _ in rest]
    shared = zerofx.Muon(module, lr=0.02, adjust_lr_fn="match_rms_adamw")
    assert [group["lr"] for group in shared.param_groups] == [0.02, 0.02]
    assert zerofx.Muon(module, lr=0.02).param_groups[1]["lr"] == 3e-4


@needs_torch_muon
def test_state_goes_to_torch_and_back() -> None:
    def kinds() -> list[tuple[Callable[[Any], torch.optim.Optimizer], Callable[[Any], torch.optim.Optimizer]]]:
        return [
            (lambda ps: zerofx.Muon(matrices_of(ps), lr=0.1), lambda ps: torch.optim.Muon(ps, lr=0.1)),
            (
                lambda ps: zerofx.Muon([{"params": ps, "use_muon": False}], adamw_lr=0.1, adamw_betas=(0.9, 0.999)),
                lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1),
            ),
        ]

    for ours, theirs in kinds():
        for first, second in ((ours, theirs), (theirs, ours), (ours, ours)):
            straight, moved = tensors(SHAPES), tensors(SHAPES)
            train([o := theirs(straight)], straight)
            train([before := first(moved)], moved)
            after = second(moved)
            after.load_state_dict(before.state_dict())
            train([o], straight, seed=2)
            train([after], moved, seed=2)
            for a, b in zip(straight, moved, strict=True):
                torch.testing.assert_close(a, b)


def test_state_of_a_model_is_loaded() -> None:
    first, x = model()
    second = copy.deepcopy(first)
    before, after = zerofx.Muon(first, lr=0.02), zerofx.Muon(second, lr=0.5)

    def steps(module: nn.Module, optimizer: zerofx.Muon) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            module(x).backward()
            optimizer.step()

    steps(first, before)
    second.load_state_dict(first.state_dict())
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert after.param_groups[0]["lr"] == 0.02
    assert set(after.state[second.layers[0].weight]) == {"momentum_buffer"}
    copied = copy.deepcopy((first, before))
    for module, optimizer in ((first, before), (second, after), copied):
        steps(module, optimizer)
    for a, b, c in zip(first.parameters(), second.parameters(), copied[0].parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_state_of_another_kind_is_refused() -> None:
    parameters = tensors(SHAPES)
    saved = zerofx.Muon(matrices_of(parameters)).state_dict()
    other = zerofx.Muon([{"params": parameters, "use_muon": False}])
    with pytest.raises(ValueError, match="parameter group 0 has use_muon=False here and use_muon=True in the state"):
        other.load_state_dict(saved)


def test_schedulers_set_both_learning_rates() -> None:
    module, x = model()
    optimizer = zerofx.Muon(module, lr=0.02, adamw_lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(zerofx.Muon(module), max_lr=0.1, total_steps=5)
    module(x).backward()
    optimizer.step()
    scheduler.step()
    cycle.optimizer.step()
    cycle.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    before = [p.detach().clone() for p in module.parameters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_a_closure_is_called_with_gradients() -> None:
    module, x = model()
    optimizer = zerofx.Muon(module, lr=0.02)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(x)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[-1] < losses[0]


def test_groups_are_added() -> None:
    module, x = model()
    optimizer = zerofx.Muon(list(module.layers.named_parameters()), lr=0.02)
    module(x).backward()
    optimizer.step()
    kept = optimizer.state[module.layers[0].bias]["exp_avg"].clone()
    more = [(n, p) for n, p in module.named_parameters() if not n.startswith("layers")]
    optimizer.add_param_group({"params": iter(more), "adamw_lr": 0.5})
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False, False]
    assert optimizer.param_groups[2]["lr"] == 0.5
    before = module.embedding.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, module.embedding.weight)
    assert optimizer.state[module.layers[0].bias]["step"] == 2
    assert not torch.equal(kept, optimizer.state[module.layers[0].bias]["exp_avg"])


def test_what_has_no_gradient_is_skipped() -> None:
    parameters = tensors(SHAPES)
    optimizer = zerofx.Muon(matrices_of(parameters))
    optimizer.step()
    parameters[2].grad = torch.randn(8, 8)
    optimizer.step()
    assert list(optimizer.state) == [parameters[2]]


def test_the_norm_is_of_all_gradients() -> None:
    ours, x = model()
    theirs = copy.deepcopy(ours)
    clipping, plain = zerofx.Muon(ours, lr=0.02, max_grad_norm=0.1), zerofx.Muon(theirs, lr=0.02)
    for _ in range(3):
        for module, optimizer in ((ours, clipping), (theirs, plain)):
            optimizer.zero_grad()
            module(x).backward()
            if optimizer is plain:
                norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
        assert clipping.grad_norm is not None
        torch.testing.assert_close(clipping.grad_norm, norm.detach(), check_dtype=False, rtol=1e-4, atol=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    before = [p.detach().clone() for p in ours.parameters()]
    assert ours.layers[0].weight.grad is not None
    ours.layers[0].weight.grad[0, 0] = math.nan
    clipping.step()
    assert all(torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True))


def test_a_scaler_unscales_and_skips() -> None:
    ours, x = model()
    theirs = copy.deepcopy(ours)
    scaled, plain = zerofx.Muon(ours, lr=0.02), zerofx.Muon(theirs, lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(ours(x)).backward()
    scaler.step(scaled)
    scaler.update()
    theirs(x).backward()
    plain.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    for p in ours.parameters():
        p.grad = torch.full_like(p, math.inf)
    before = [p.detach().clone() for p in ours.parameters()]
    scaler.step(scaled)
    assert all(torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True))


@pytest.mark.parametrize("options", [{}, {"ns_coefficients": "polar_express", "adjust_lr_fn": "match_rms_adamw"}])
def test_a_model_trains_in_float32(options: dict[str, Any]) -> None:
    module, x = model()
    optimizer = zerofx.Muon(module, lr=0.02, adamw_lr=0.02, iteration_dtype=torch.float32, max_grad_norm=1.0, **options)
    first = module(x).item()
    for _ in range(60):
        optimizer.zero_grad()
        loss = module(x)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3 * first


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -1.0}, r"zerofx.Muon: lr=-1.0: expected a number of 0 or above"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1: expected a number of 0"),
        ({"momentum": 1.0}, "momentum=1.0: expected a number from 0 to below 1"),
        ({"eps": 0.0}, "eps=0.0: expected a number above 0"),
        ({"ns_steps": 0}, "ns_steps=0: expected a whole number from 1 to 99"),
        ({"adjust_lr_fn": "rms"}, 'adjust_lr_fn=\'rms\': expected "original", "match_rms_adamw" or None'),
        ({"iteration_dtype": torch.float16}, "iteration_dtype=torch.float16: expected torch.bfloat16 or torch.float32"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0: expected a number above 0, or None"),
        ({"adamw_lr": -1.0}, "adamw_lr=-1.0"),
        ({"adamw_betas": (0.9, 1.0)}, r"adamw_betas=\(0.9, 1.0\): expected two numbers from 0 to below 1"),
        ({"ns_coefficients": "quartic"}, "ns_coefficients='quartic': expected three numbers, three for each step"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients=\(1.0, 2.0\): expected three"),
        ({"splits": {"*.weight": 3}}, r"splits={'\*.weight': 3}: 'layers.0.weight' has 8 rows: expected a number"),
        ({"splits": {"layers.0.weight": [4, 3]}}, r"splits={'layers.0.weight': \[4, 3\]}: .* has 8 rows"),
        ({"splits": {"*.qkv.*": 3}}, r"splits='\*.qkv.\*' is the name of no parameter: .* names like 'token'"),
        ({"others": ["layer.*"]}, r"others='layer.\*' is the name of no parameter"),
        ({"matrices": "haed.weight"}, "matrices='haed.weight' is the name of no parameter"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        zerofx.Muon(Model(), **options)


def test_bad_groups_are_refused() -> None:
    module, _ = model()
    with pytest.raises(ValueError, match=r"a parameter of shape \(11, 8\) without a name: expected to know"):
        zerofx.Muon(module.parameters())
    with pytest.raises(ValueError, match="in a group with use_muon=True: expected real matrices"):
        zerofx.Muon(matrices_of([module.norm.weight]))
    with pytest.raises(ValueError, match=r"zerofx\.Muon: momentum=-1: expected"):
        zerofx.Muon([{"params": [module.lm_head.weight], "use_muon": True, "momentum": -1}])
    part = nn.Parameter(torch.randn(4, 4))
    part._dtensor = object()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="is a DTensor, of which this rank has a part: expected whole matrices"):
        zerofx.Muon([("up.weight", part)])
    zerofx.Muon([("up.weight", part)], others=["up.*"])
    with pytest.raises(ValueError, match="empty parameter list"):
        zerofx.Muon([])
    with pytest.raises(TypeError, match="ordered collections"):
        zerofx.Muon([{"params": set(module.parameters())}])
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        zerofx.Muon([{"params": [3], "use_muon": True}])
    with pytest.raises(ValueError, match="Some param names are missing"):
        zerofx.Muon([{"params": [("a", module.lm_head.weight), module.norm.weight]}])


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"a matrix of shape \(10, 4\) has a sparse gradient: expected a dense one"):
        zerofx.Muon(matrices_of([table.weight])).step()
