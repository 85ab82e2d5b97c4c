"""CUDA code without a GPU: what is written, that all is put back, and that machine code comes of it.

With PyTorch's CUDA build alone; ``make cuda-dry`` runs these.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zerofx
from tests.cuda_dry.reading import facts
from zerofx import _torch
from zerofx._torch.pretended_cuda import pretended_cuda
from zerofx._torch.python_engine import gradients
from zerofx.compiler.records import GraphRecord

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None, reason="PyTorch is built for the CPU: make cuda-dry"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing need be pretended"),
    pytest.mark.timeout(3600),
]


class Net(nn.Module):
    """A product, attention, a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(64, 192), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return (x + self.out(y)).square().mean()


def written(**options: Any) -> GraphRecord:
    torch._dynamo.reset()
    options = {"device": "cuda", "backend": "nccl", "world_size": 4, "code": True, "stage": 3, **options}
    return zerofx.dry_run(Net(), torch.randn(2, 16, 64), groups=zerofx.Grouping(min_bytes=0), **options)


@pytest.fixture(scope="module")
def record() -> GraphRecord:
    precision = zerofx.MixedPrecision(torch.bfloat16, torch.float32)
    return written(mixed_precision=precision)


def test_the_code_is_cudas_and_was_read(record: GraphRecord) -> None:
    for trace in record.traces():
        assert trace.code is not None and "torch.cuda._DeviceGuard(0)" in trace.code and "cpp_fused" not in trace.code
        assert trace.seconds["check_code"] > 0
        found = facts(trace)
        assert found["triton"] and found["extern"] and not found["unknown"]
        assert found["collectives"]
    assert record.forward is not None and record.backward is not None
    assert "_scaled_dot_product_flash_attention.default" in (record.forward.code or "")
    assert "_scaled_dot_product_flash_attention_backward.default" in (record.backward.code or "")
    assert "reduce_scatter_tensor.default" in (record.backward.code or "")


def test_every_kernel_becomes_machine_code_without_spills(record: GraphRecord) -> None:
    assert record.backward is not None
    kernels = _torch.kernel_texts(record.backward.code or "")
    assert len(kernels) > 3
    for architecture in ("sm_80", "sm_90"):
        codes = _torch.machine_code(kernels[:3], architecture)
        assert {code.kernel for code in codes} == {kernel.name for kernel in kernels[:3]}
        assert not [code for code in codes if code.error or code.spilled or not code.registers or not code.cubin]


def test_a_kernel_that_cannot_be_compiled_says_why() -> None:
    text = "import triton\n\ndef kernel():\n    pass\n"
    (code,) = _torch.machine_code([_torch.KernelText("kernel", text)], "sm_90")
    assert "AttributeError" in code.error and not code.cubin


def test_all_is_put_back() -> None:
    import torch._inductor.config
    from torch._subclasses.fake_tensor import FakeTensorMode
    from triton.runtime import driver

    def state() -> list[Any]:
        attention = torch.ops.aten.scaled_dot_product_attention.default
        return [
            *(torch.cuda.is_available(), torch.cuda.get_device_properties, torch.autograd.grad, driver._active),
            *(torch.utils._triton.has_triton(), FakeTensorMode.avoid_device_init, dict(attention.py_kernels)),
            *(torch._inductor.config.shape_padding, torch._inductor.config.compile_threads),
        ]

    before = state()
    with pytest.raises(ZeroDivisionError), pretended_cuda("sm_80"):
        assert torch.cuda.get_device_properties().name.startswith("NVIDIA A100") and torch.utils._triton.has_triton()
        assert state() != before
        raise ZeroDivisionError
    assert state() == before


def test_the_cpu_compiles_as_before_when_code_for_cuda_was_written(record: GraphRecord) -> None:
    torch._dynamo.reset()
    x = torch.randn(8)
    assert torch.equal(torch.compile(lambda x: x * 2 + 1, backend="aot_eager")(x), x * 2 + 1)


def test_an_engine_in_python_gives_the_gradients_of_the_one_in_cpp() -> None:
    from contextlib import nullcontext

    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 16, 64, requires_grad=True)
    unused = torch.randn(3, requires_grad=True)
    loss = net(x) + (x * 2).sum(0)[0].norm()
    inputs = [x, *net.parameters(), unused]
    expected = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True)
    found = gradients([loss], inputs, [torch.ones(())], lambda node: nullcontext())
    assert found[-1] is None is expected[-1]
    for a, b in zip(found[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("stage", [0, 2])
def test_other_stages_are_written_for_the_architecture_asked_for(stage: int) -> None:
    record = written(stage=stage, architecture="sm_80")
    for trace in record.traces():
        assert "cc=80" in (trace.code or "") and "cc=90" not in (trace.code or "")
        assert facts(trace)["triton"]


def test_the_environment_has_what_compiles() -> None:
    import triton

    assert os.path.exists(triton.knobs.nvidia.ptxas.path) and os.path.exists(triton.knobs.nvidia.cuobjdump.path)
