"""A sharded module in a wrapper that would shard it, or average its gradients, once more is refused by name."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_param

import zerofx
from tests.test_bad_input import Net
from zerofx._torch import FSDP_MARKS


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("wrapper", [nn.parallel.DistributedDataParallel, nn.DataParallel])
def test_a_wrapper_that_would_average_gradients_again_is_refused(
    fake_world: Callable[..., None], wrapper: type[nn.Module], stage: int
) -> None:
    fake_world(2)
    model = nn.Sequential(nn.Linear(3, 5), zerofx.shard(Net(), stage=stage))
    with pytest.raises(ValueError, match=rf"{wrapper.__name__} around Sequential, whose 'first\.weight' zerofx has"):
        wrapper(model)
    nn.Sequential(model)  # other modules take it
    wrapper(nn.Sequential(nn.Linear(3, 5)))  # and others are wrapped


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("wrapper", ["FullyShardedDataParallel", "fully_shard"])
def test_fsdp_of_either_kind_is_refused_before_it_has_changed_anything(
    fake_world: Callable[..., None], wrapper: str, stage: int
) -> None:
    if wrapper == "fully_shard" and "_fsdp_orig_uid" not in inspect.getsource(_fsdp_param):
        pytest.skip("this PyTorch's fully_shard asks no parameter before it takes it")
    fake_world(2)
    model = nn.Sequential(nn.Linear(3, 5), zerofx.shard(Net(), stage=stage))
    before = [(name, type(p)) for name, p in model.named_parameters()]
    options = {} if wrapper == "fully_shard" else {"device_id": torch.device("cpu")}
    with (
        warnings.catch_warnings(),
        pytest.raises(ValueError, match=rf"{wrapper} of 'first\.weight', which zerofx has sharded: zerofx divides it"),
    ):
        warnings.simplefilter("error")  # nothing is gathered
        getattr(fsdp, wrapper)(model[1:], **options)
    assert [(name, type(p)) for name, p in model.named_parameters()] == before
    getattr(fsdp, wrapper)(nn.Sequential(nn.Linear(3, 5)), **options)  # others are taken


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "wrapper", ["DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"]
)
def test_what_is_wrapped_already_is_refused_before_anything_has_changed(
    fake_world: Callable[..., None], wrapper: str, stage: int
) -> None:
    fake_world(2)
    net = Net()
    if wrapper == "FSDPModule":
        wrapped: nn.Module = fsdp.fully_shard(net, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    elif wrapper == "FullyShardedDataParallel":
        wrapped = fsdp.FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        wrapped = getattr(nn.parallel, wrapper)(net)
    before = [(name, type(p)) for name, p in wrapped.named_parameters()]
    with pytest.raises(ValueError, match=rf"the module is a {wrapper}: it averages gradients over the ranks"):
        zerofx.compile(wrapped, stage=stage)
    with pytest.raises(ValueError, match=rf"'1' is a {wrapper}: .*: zerofx\.compile\(model, stage=3\) takes its place"):
        zerofx.shard(nn.Sequential(nn.Linear(3, 5), wrapped), stage=stage)
    assert [(name, type(p)) for name, p in wrapped.named_parameters()] == before


def test_torch_compile_of_a_wrapper_is_refused(fake_world: Callable[..., None]) -> None:
    fake_world(2)
    compiled = torch.compile(nn.parallel.DistributedDataParallel(Net()), backend="zerofx", options={"stage": 0})
    with pytest.raises(Exception, match="the module is a DistributedDataParallel: it averages gradients"):
        compiled(torch.ones(1, 5))


@pytest.mark.parametrize("stage", [0, 3])
def test_the_marks_of_fsdp_are_absent_to_everybody_else(fake_world: Callable[..., None], stage: int) -> None:
    fake_world(2)
    for parameter in zerofx.shard(Net(), stage=stage).parameters():
        for mark in FSDP_MARKS:  # as the optimizers of prodigyopt and dadaptation look for them
            assert not hasattr(parameter, mark)
            assert getattr(parameter, mark, 3) == 3
