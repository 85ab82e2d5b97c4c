"""What zerofx cannot do is refused with an error that names the thing, and the module stays as it was."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.exc import InvalidCxxCompiler

import zerofx
from tests.counting import count_collectives
from tests.workers import Workers
from zerofx.compiler.backend import Backend, zerofx_backend
from zerofx.compiler.captured import check_one_module
from zerofx.compiler.options import Options
from zerofx.compiler.records import Trace

Build = Callable[[], nn.Module]


class Net(nn.Module):
    """Plain; a case adds to it what is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3)
        self.register_buffer("count", torch.tensor(dist.get_rank() if dist.is_initialized() else 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).sum()


def with_extra(parameter: Any) -> Net:
    net = Net()
    net.extra = parameter
    return net


def with_view() -> Net:
    net = Net()
    net.extra = nn.Parameter(net.first.weight.detach()[1:3])
    return net


def with_gradient() -> Net:
    net = Net()
    net(torch.ones(1, 5)).backward()
    return net


class Special(nn.Parameter):
    pass


@contextlib.contextmanager
def nothing_happens(exchanges: int = 1) -> Iterator[None]:
    """No graph is rewritten inside, and no collective runs but ``exchanges``: ranks say whether they can go on."""
    rewritten: list[Any] = []
    run = Trace.run

    def counted(trace: Trace, gm: Any) -> Any:
        rewritten.append(gm)
        return run(trace, gm)

    Trace.run = counted  # type: ignore[method-assign]
    try:
        with count_collectives() as log:
            yield
    finally:
        Trace.run = run  # type: ignore[method-assign]
    assert not rewritten
    # `all_gather_object`: lengths, then texts
    assert not dist.is_initialized() or (
        log.calls["all_gather"] <= 2 * exchanges and set(log.calls) <= {"all_gather"}
    ), log


def refused(match: str, build: Build = Net, error: type[Exception] = ValueError, **options: Any) -> None:
    """zerofx.compile and zerofx.shard raise ``error``, and nothing of the module has changed."""
    for call in (zerofx.compile, zerofx.shard):
        module = build()
        parameters = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
        before = {name: (type(p), copy_of(p)) for name, p in parameters.items()}
        buffers = [b.clone() for b in module.buffers()] if isinstance(module, nn.Module) else []
        with nothing_happens(), pytest.raises(error, match=match):
            call(module, **options)
        for name, (kind, value) in before.items():
            p = module.get_parameter(name)
            assert p is parameters[name] and type(p) is kind, name
            assert value is None or torch.equal(p, value), name
        if buffers:
            assert all(torch.equal(a, b) for a, b in zip(module.buffers(), buffers))
            assert module._compiled_call_impl is None


def copy_of(p: nn.Parameter) -> torch.Tensor | None:
    with torch.no_grad():
        return None if p.is_meta or p.is_sparse or nn.parameter.is_lazy(p) else p.clone()


OPTIONS: dict[str, tuple[str, dict[str, Any], type[Exception]]] = {
    "stage 4": ("stage=4", {"stage": 4}, ValueError),
    "stage -1": ("stage=-1.*0, 1, 2 or 3", {"stage": -1}, ValueError),
    "buckets": ("buckets='layer'.*'group', 'parameter', 'all'", {"stage": 0, "buckets": "layer"}, ValueError),
    "buckets of another stage": ("buckets='all' with stage=2", {"stage": 2, "buckets": "all"}, ValueError),
    "precision as a dtype": (
        "mixed_precision=torch.bfloat16.*MixedPrecision",
        {"mixed_precision": torch.bfloat16},
        ValueError,
    ),
    "stage as text": ("stage='3'", {"stage": "3"}, ValueError),
    "unknown option": ("unknown option 'bucket_bytes'.*memory_budget", {"bucket_bytes": 3}, ValueError),
    "executor": ("executor='cudagraphs'.*'inductor'.*'eager'", {"executor": "cudagraphs"}, ValueError),
    "no executor": ("executor=None", {"executor": None}, ValueError),
    "no prefetch": ("memory_budget=0", {"memory_budget": 0}, ValueError),
    "negative prefetch": ("memory_budget=-5", {"memory_budget": -5}, ValueError),
    "prefetch as text": ("memory_budget='1GB'", {"memory_budget": "1GB"}, (ValueError, TypeError)),  # type: ignore
    "groups of a number": ("groups=5", {"groups": 5}, TypeError),
    "groups of a name": ("groups='Linear'", {"groups": "Linear"}, TypeError),
    "groups of other classes": ("groups=.*int", {"groups": (int,)}, TypeError),
    "groups of a class not there": ("no module of this Net matches", {"groups": (nn.Conv2d,)}, ValueError),
    "groups of a module": ("groups=", {"groups": nn.Linear(2, 2)}, (TypeError, ValueError)),  # type: ignore
    "mesh of the wrong type": ("mesh=", {"mesh": "cpu"}, (TypeError, ValueError)),  # type: ignore
}


@pytest.mark.parametrize("case", OPTIONS)
def test_bad_options_are_named_and_change_nothing(fake_world: Callable[..., None], case: str) -> None:
    fake_world(2)
    match, options, error = OPTIONS[case]
    refused(match, error=error, **options)


def test_a_mesh_of_three_dimensions_is_refused(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    refused("mesh has 3 dimensions: expected one, or two", mesh=dist.init_device_mesh("cpu", (2, 2, 1)))


def test_shardings_that_there_are_not_are_refused(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    mesh, between = dist.init_device_mesh("cpu", (2, 2)), zerofx.Sharding(gradients="all", optimizer="all")
    refused("expected a zerofx.Sharding", mesh=mesh, sharding="hsdp")
    refused("sharding= without mesh=", sharding=between)
    refused("with stage=2: expected stage=3", mesh=mesh, sharding=between, stage=2)
    refused("Leave one out", mesh=mesh, sharding=between, one_copy=True)
    refused("have groups of their own already", mesh=mesh, sharding=between, reduce_group=dist.group.WORLD)
    for wrong, match in (
        ({"weights": "none"}, "weights='none', expected"),
        ({"optimizer": "all"}, "Give both alike"),
        ({"backward": "all"}, "cannot be gathered from all"),
    ):
        with pytest.raises(ValueError, match=match):
            zerofx.Sharding(**wrong)


def test_bad_options_of_the_named_backend_are_named_too(fake_world: Callable[..., None]) -> None:
    fake_world(2)
    torch._dynamo.reset()
    module = torch.compile(Net(), backend="zerofx", options={"stagee": 3})
    with nothing_happens(), pytest.raises(Exception, match="unknown option 'stagee'"):
        module(torch.ones(1, 5))


MODULES: dict[str, tuple[str, Build]] = {
    "no module": ("expected an nn.Module, got list", lambda: [nn.Linear(2, 2)]),  # type: ignore
    "no parameters": ("ReLU has no parameters", nn.ReLU),
    "partly meta": (
        "'extra' on meta|different devices: 'extra'.*'first.weight'",
        lambda: with_extra(nn.Parameter(torch.zeros(3, device="meta"))),
    ),
    "meta without reset_parameters": (
        "'gain' is on the meta device, and its Gain has no reset_parameters",
        lambda: Gain().to("meta"),
    ),
    "complex": (
        "'extra' has dtype torch.complex64.*imaginary",
        lambda: with_extra(nn.Parameter(torch.zeros(3, dtype=torch.complex64))),
    ),
    "sparse lookup": (
        "'0' is an Embedding with sparse=True: expected sparse=False",
        lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True)),
    ),
    "sparse": ("'extra' has layout torch.sparse_coo", lambda: with_extra(nn.Parameter(torch.eye(3).to_sparse()))),
    "shared memory": (
        "'extra' and 'first.weight' share memory|'first.weight' and 'extra' share memory",
        lambda: (lambda net: setattr(net, "extra", nn.Parameter(net.first.weight.detach())) or net)(Net()),
    ),
    "a view of another": ("'extra' and 'first.weight'|'first.weight' and 'extra'", with_view),
    "gradient": ("'first.weight' has a gradient already", with_gradient),
    "subclass": ("'extra' is a Special", lambda: with_extra(Special(torch.zeros(3)))),
    "lazy": ("'0.weight' is a UninitializedParameter", lambda: nn.Sequential(nn.LazyLinear(3))),
}


@pytest.mark.parametrize("case", MODULES)
def test_modules_that_cannot_be_sharded_are_refused_whole(fake_world: Callable[..., None], case: str) -> None:
    fake_world(2)
    match, build = MODULES[case]
    refused(match, build)


def test_no_process_group_is_said_so() -> None:
    assert not dist.is_initialized()
    refused("no process group: .*init_process_group.*torchrun", error=RuntimeError)


def test_a_module_is_sharded_once(fake_world: Callable[..., None]) -> None:
    fake_world(1)
    module = zerofx.shard(Net())
    for call in (zerofx.shard, zerofx.compile):
        with pytest.raises(ValueError, match=r"'first\.weight' is sharded already"):
            call(module)
    outer = nn.Sequential(nn.Linear(3, 5), module)  # within another as well
    with pytest.raises(ValueError, match=r"'1\.first\.weight' is sharded already"):
        zerofx.compile(outer)
    assert type(outer[0].weight) is nn.Parameter
    with pytest.raises(ValueError, match="is not sharded"):
        zerofx.graphs(nn.Linear(2, 2))


# -- what is refused once a module is sharded


REFUSALS: dict[str, Callable[[Any, Any], Any]] = {
    "data of another shape": lambda module, weight: setattr(weight, "data", torch.zeros(3)),
    "deepcopy of a parameter": lambda module, weight: copy.deepcopy(weight),
    "pickle": lambda module, weight: pickle.dumps(weight),
    "torch.save": lambda module, weight: torch.save(module.state_dict(), io.BytesIO()),
    "pickle of a module": lambda module, weight: pickle.dumps(module),
    "torch.save of a module": lambda module, weight: torch.save(module, io.BytesIO()),
    "load_state_dict of others": lambda module, weight: module.load_state_dict(Net().state_dict(), assign=True),
    "load_state_dict into a part": lambda module, weight: module.first.load_state_dict(
        Net().first.state_dict(), assign=True
    ),
    "half": lambda module, weight: module.half(),
    "double": lambda module, weight: module.double(),
    "to bfloat16": lambda module, weight: module.to(torch.bfloat16),
    "to another device": lambda module, weight: module.to("meta"),
    "to_empty": lambda module, weight: module.to_empty(device="cpu"),
    "share_memory": lambda module, weight: module.share_memory(),
    "set_ of another shape": lambda module, weight: weight.detach().set_(torch.zeros(3)),
    "t_": lambda module, weight: weight.detach().t_(),
    "resize_": lambda module, weight: weight.detach().resize_(3),
    "backward of itself": lambda module, weight: weight.backward(),
}


def check_later() -> dict[str, str]:
    failures = {}
    for what, action in REFUSALS.items():
        module = zerofx.shard(Net())
        before = {name: (p, p.full_tensor()) for name, p in module.named_parameters()}  # type: ignore
        try:
            action(module, module.first.weight)
            failures[what] = "accepted"
        except (RuntimeError, TypeError, NotImplementedError) as e:
            if "'first.weight'" not in str(e):
                failures[what] = f"the error does not name the parameter: {e}"
            if what.endswith("of another shape") and "resize before zerofx.compile" not in str(e):
                failures[what] = f"the error does not say what to do: {e}"
        for name, (p, value) in before.items():
            if module.get_parameter(name) is not p or not torch.equal(p.full_tensor(), value):
                failures[what] = failures.get(what, "refused") + f", and {name} changed"
    module = zerofx.shard(Net())
    weight, value = module.first.weight, module.first.weight.full_tensor()
    module.to("cpu").float().train().requires_grad_(True)  # what changes nothing is fine
    assert module.first.weight is weight and torch.equal(weight.full_tensor(), value)
    return failures


@pytest.fixture(scope="module")
def later(workers2: Workers) -> list[dict[str, str]]:
    return workers2.run(check_later)


@pytest.mark.parametrize("what", REFUSALS)
def test_what_would_go_around_the_slices_is_refused(later: list[dict[str, str]], what: str) -> None:
    assert [failures.get(what) for failures in later] == [None, None]


# -- ranks that disagree


def different(what: str, rank: int) -> nn.Module:
    net = Net()
    if rank == 1:
        if what == "shape":
            net.second = nn.Linear(7, 4)
        elif what == "name":
            net.third = nn.Parameter(torch.zeros(3))
        elif what == "dtype":
            net.second.bfloat16()
        elif what == "requires_grad":
            net.second.bias.requires_grad_(False)
        elif what == "buffer":
            net.register_buffer("count", torch.zeros(1000))
        elif what == "hook":
            net.second.weight.register_hook(print)
    return net


def check_ranks(what: str) -> str:
    module = different(what, dist.get_rank())
    before = [p.detach().clone() for p in module.parameters()]
    with nothing_happens(2), pytest.raises((RuntimeError, ValueError)) as caught:  # and once more, what differs
        zerofx.compile(module)
    for p, value in zip(module.parameters(), before):
        assert type(p) is nn.Parameter and torch.equal(p, value)
    return str(caught.value)


DIFFER = {
    "shape": ("the parameter 'second.weight': ", "float32 [4, 7] on rank 1"),
    "name": ("the parameter 'third': ", "not there on rank", "float32 [3] on rank 1"),
    "dtype": ("the parameter 'second.weight': ", "bfloat16", "on rank 1"),
    "requires_grad": ("the parameter 'second.bias': ", ", frozen on rank 1"),
    "buffer": ("they differ in buffer 'count'",),
    "hook": ("they differ in hooks on gradients",),
}


@pytest.mark.parametrize("what", DIFFER)
def test_ranks_with_different_models_all_raise(workers3: Workers, what: str) -> None:
    for message in workers3.run(check_ranks, what, timeout=15):
        assert "rank 1" in message and "different models" in message, message
        assert all(part in message for part in DIFFER[what]), message


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_of_two_modules_are_refused_where_code_cannot_run_uncompiled(
    fake_world: Callable[..., None], stage: int
) -> None:
    """Their groups have equal names and layouts here: the gradient of one would go to the other."""
    fake_world(2)
    weights: list[Any] = [zerofx.shard(Net(), stage=stage).first.weight for _ in range(2)]
    with pytest.raises(RuntimeError, match="of two modules that were sharded one by one: expected weights of one"):
        check_one_module(weights)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(300, 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


def loose(x: torch.Tensor, weight: nn.Parameter = nn.Parameter(torch.ones(3))) -> torch.Tensor:  # noqa: B008
    return x * weight


def added() -> nn.Module:
    net = zerofx.shard(Net(), stage=3)
    net.second.bias = nn.Parameter(torch.zeros(3))
    return net


def of_a_gradient() -> Callable[..., Any]:
    module = zerofx.shard(Gain(), stage=3)
    gradient = module.gain.like(torch.ones_like(module.gain.to_local()))
    return lambda x: gradient * x


LATE: dict[str, tuple[str, Callable[[], Any], dict[str, Any], torch.Tensor]] = {
    "no module": ("outside of any module", lambda: loose, {}, torch.ones(3)),
    "an added parameter": ("the parameter 'second.bias' of Net is not sharded", added, {}, torch.ones(1, 5)),
    "the meta device": ("is on the meta device, and", lambda: Net().to("meta"), {}, torch.ones(1, 5, device="meta")),
    "mixed precision": (
        *("mixed_precision in torch.compile", Net),
        *({"mixed_precision": zerofx.MixedPrecision(torch.bfloat16)}, torch.ones(1, 5)),
    ),
    "leaf modules": ("leaf_modules in torch.compile", Net, {"leaf_modules": [nn.Linear]}, torch.ones(1, 5)),
    "a gradient": ("not a parameter", of_a_gradient, {}, torch.ones(300, 100)),
}


@pytest.mark.parametrize("case", LATE)
def test_what_a_trace_finds_is_refused_before_a_graph_is_rewritten(fake_world: Callable[..., None], case: str) -> None:
    fake_world(2)
    torch._dynamo.reset()
    match, build, options, x = LATE[case]
    compiled = torch.compile(build(), backend="zerofx", options={"executor": "eager", **options})
    with nothing_happens(), pytest.raises(Exception, match=match):
        compiled(x)


def test_without_a_cpp_compiler_inductor_says_what_to_do(
    fake_world: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_world(2)
    torch._dynamo.reset()
    module = zerofx.compile(Net(), stage=3)

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(Exception, match=re.escape("install g++ (or name another in the environment, CXX=clang++)")):
        module(torch.ones(1, 5))


@pytest.mark.parametrize("how", ["torch.cond", "torch.export"])
def test_what_cannot_run_uncompiled_is_refused_to_another_backend(fake_world: Callable[..., None], how: str) -> None:
    fake_world(2)
    torch._dynamo.reset()
    module = zerofx.shard(Gain(), stage=3)
    text = "sharded parameter 'gain' is being compiled by another backend than zerofx"
    with nothing_happens(), pytest.raises(Exception, match=text):
        if how == "torch.cond":
            torch.cond(torch.ones(()) > 0, module, lambda x: x - module.gain, (torch.ones(300, 100),))
        else:
            torch.export.export(module, (torch.ones(300, 100),), strict=True)


def test_an_error_that_comes_through_dynamo_begins_with_the_stage_and_what_was_chosen(
    fake_world: Callable[..., None],
) -> None:
    fake_world(2)
    for options, shown in [
        ({"memory_budget": 1.0}, "zerofx(stage=3, memory_budget=1.0)"),
        (
            {"stage": 2, "executor": "eager", "memory": 1000},
            "zerofx(stage=2, executor='eager', memory=1000)",
        ),
    ]:
        torch._dynamo.reset()
        module = zerofx.compile(Net(), **options)
        with pytest.raises(Exception, match="is too small") as caught:
            module(torch.ones(1, 5))
        begins, _, rest = str(caught.value).partition(" raised:")
        assert begins in (f"backend='{shown}'", f'backend="{shown}"')
        assert "Options(" not in rest


def test_options_show_what_differs_from_the_defaults() -> None:
    shown = repr(Options(stage=2, reduce_group="slow", groups=(nn.Linear,)))
    assert shown == f"zerofx(stage=2, groups=({nn.Linear!r},), reduce_group='slow')"
    assert repr(Options()) == repr(Backend(Options())) == "zerofx(stage=3)"


def test_a_function_around_the_backend_is_known_by_functools_wraps(fake_world: Callable[..., None]) -> None:
    fake_world(1)
    torch._dynamo.reset()
    seen = []

    @functools.wraps(zerofx_backend)
    def watched(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        seen.append(gm)
        return zerofx_backend(gm, inputs, options={"executor": "eager"})

    module = zerofx.shard(Gain(), stage=3)
    assert torch.compile(module, backend=watched)(torch.ones(300, 100)).eq(1).all()
    assert len(seen) == 1


def refuse_gloo_on_a_gpu() -> str:
    from zerofx.compiler.checks import check_backend

    check_backend(dist.group.WORLD, torch.device("cpu"))
    with pytest.raises(ValueError, match=r'parameters on cuda with the backend gloo: .*init_process_group\("nccl"\)'):
        check_backend(dist.group.WORLD, torch.device("cuda"))
    return "refused"


def test_gloo_with_parameters_on_a_gpu_is_refused(workers2: Workers) -> None:
    assert workers2.run(refuse_gloo_on_a_gpu) == ["refused"] * 2


def test_another_gpu_than_the_current_one_is_refused(fake_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from zerofx.compiler import checks

    fake_world(2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(checks, "backend_name", lambda process_group, device: "nccl")
    checks.check_backend(dist.group.WORLD, torch.device("cuda", 0))
    with pytest.raises(
        ValueError, match=r"parameters on cuda:1, while the current device is cuda:0: .*set_device\(1\)"
    ):
        checks.check_backend(dist.group.WORLD, torch.device("cuda", 1))


def test_an_optimizer_over_two_devices_is_refused() -> None:
    here, there = (nn.Parameter(torch.ones(2, device=device)) for device in ("cpu", "meta"))
    for p in (here, there):
        p.grad = torch.zeros_like(p)
    with pytest.raises(ValueError, match=r"zerofx\.AdamW: parameters on cpu and on meta: expected one device"):
        zerofx.AdamW([here, there]).step()


def test_an_option_that_is_gone_says_what_to_do_instead() -> None:
    with pytest.warns(DeprecationWarning, match="pool= does nothing any more. .*MALLOC_MMAP_MAX_=0") as found:
        options = Options.of({"pool": True, "stage": 2})
    assert options == Options(stage=2) and len(found) == 1
