"""Errors of Inductor that were mended are refused where the mend is taken out; what cannot be read is said; kernels."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.passes.generated import code_of, generated
from tests.passes.test_save_reads import WAYS, Counting
from tests.test_generated_order import CASES, other_loops
from zerofx import _torch
from zerofx._torch import inductor
from zerofx.compiler import cut
from zerofx.passes import Context, VerificationError
from zerofx.passes.proof.code import Promise, check_code
from zerofx.passes.proof.code.kernel import read_kernel

# ---- dependences_kept


def read_once(function: Callable) -> None:
    from torch._inductor.decomposition import select_decomp_table

    gm = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*CASES[function])
    promise = Promise.of(gm, Context(phase="inference", process_group="0"))
    assert promise.arriving == {2: 1}
    check_code(code_of(gm), promise)


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_code_in_which_dependences_were_kept_passes(function: Callable) -> None:
    read_once(function)


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="Inductor keeps the names by itself")
def test_without_dependences_kept_the_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "dependences_kept", contextlib.nullcontext)
    with pytest.raises(VerificationError, match=r"rule 'wait' at line .*cpp_fused.*still under way") as refused:
        read_once(other_loops)
    assert refused.value.rule == "wait"


# ---- sent_kept


class Added(nn.Module):
    """What comes back to the sum is sent as the gradients of rows, and is the gradient of the tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table, self.head = nn.Linear(8, 8), nn.Embedding(4096, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(x)) + self.table(x[..., 0].abs().long())).sum()


def read_added() -> None:
    groups = zerofx.Grouping([nn.Linear, nn.Embedding], min_bytes=0)
    for each in generated((Added(), torch.randn(2, 4, 8)), stage=3, lookups=True, groups=groups):
        assert "own_rows" in each.code or "backward" in each.name
        check_code(each.code, each.promise)


def test_code_in_which_what_is_sent_was_kept_passes() -> None:
    read_added()


def test_without_sent_kept_the_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "sent_kept", contextlib.nullcontext)
    with pytest.raises(VerificationError, match=r"rule 'send' at line .*cpp_fused.*still being sent"):
        read_added()


# ---- save_reads


class Checkpointed(nn.Module):
    """A checkpoint runs its forward again, after the write: as in eager PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Counting("read, then written")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[return-value]


def read_pair(module: nn.Module) -> dict[str, str]:
    """Forward's code, then backward's with what the first has written."""
    forward, backward = generated((module, torch.randn(2, 4, 6)), stage=3)
    written = check_code(forward.code, forward.promise)
    assert written is not None
    check_code(backward.code, backward.promise, written)
    return written


@pytest.mark.parametrize("how", WAYS)
def test_with_save_reads_backward_reads_nothing_that_forward_wrote_to(how: str) -> None:
    read_pair(Counting(how))


@pytest.mark.parametrize("how", ["read, then written", "read as a copy", "a queue of keys"])
def test_without_save_reads_the_code_is_refused(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(cut, "save_reads", lambda joint: 0)
    with pytest.raises(VerificationError, match=r"to which forward has written since: '.*cpp_fused") as refused:
        read_pair(Counting(how))
    assert refused.value.rule == "reread"


def test_what_a_checkpoint_reads_again_is_not_refused() -> None:
    read_pair(Checkpointed())


# ---- what has no elements


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


@pytest.mark.parametrize("stage", range(4))
def test_a_gradient_without_elements_is_made_of_nothing(fake_world: Callable[..., None], stage: int) -> None:
    """Inductor allocates it, and leaves its reduction to itself."""
    fake_world(2)
    low = zerofx.MixedPrecision(torch.float32, torch.float32)
    model = zerofx.compile(Empty(), stage=stage, mixed_precision=low)
    model(torch.randn(2, 3, dtype=torch.float64)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.numel() == 0


# ---- in a compilation


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def compiled() -> nn.Module:
    torch._dynamo.reset()
    return zerofx.compile(Net(), stage=3, groups=zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0))


def test_a_compilation_reads_its_code_and_says_where_it_is(
    fake_world: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_world(2)
    model = compiled()
    model(torch.randn(4, 8))
    (record,) = zerofx.graphs(model)
    assert record.forward is not None and record.forward.code is not None
    assert record.forward.seconds["check_code"] > 0

    def without_waits(code: object) -> str:
        text = _torch.inductor.source_code(code)
        assert text is not None and "wait_tensor" in text
        return "\n".join(line for line in text.splitlines() if "wait_tensor.default(" not in line)

    monkeypatch.setattr(cut._torch, "source_code", without_waits)
    with pytest.raises(RuntimeError, match=r"rule 'wait'.*of group 'first'.*self.first") as refused:
        compiled()(torch.randn(4, 8))
    path = str(refused.value).partition("The graphs were saved in ")[2].split()[0].rstrip(".")
    saved = Path(path).read_text()
    assert "\ncode:\n" in saved and "def call(" in saved
    Path(path).unlink()


def test_code_that_cannot_be_read_is_warned_of(
    fake_world: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_world(2)
    for code in (None, "cpp_wrapper_src = '''#include <vector>'''\ncall = load(cpp_wrapper_src)\n"):
        monkeypatch.setattr(cut._torch, "source_code", lambda compiled, code=code: code)
        with pytest.warns(UserWarning, match=r"the code that Inductor generated for forward was not checked"):
            compiled()(torch.randn(4, 8))


# ---- kernels, as text


TRITON = '''
triton_poi_fused_add_clone_0 = async_compile.triton('triton_poi_fused_add_clone_0', """
@triton_heuristics.pointwise(inductor_meta={'mutated_arg_names': ['in_out_ptr0']})
@triton.jit
def triton_poi_fused_add_clone_0(in_out_ptr0, in_ptr0, in_ptr1, out_ptr0, out_ptr1, xnumel, XBLOCK : tl.constexpr):
    xmask = xindex < xnumel
    tmp0 = tl.load(in_out_ptr0 + (x0), xmask)
    tmp1 = tl.load(in_ptr0 + (x0), xmask).to(tl.float32)
    tmp2 = tmp0 + tmp1
    tmp3 = tl.load(in_ptr1 + (tmp4), xmask)
    tl.store(in_out_ptr0 + (x0), tmp2, xmask)
    tl.store(out_ptr0 + (x0), tmp1, xmask)
    tl.store(out_ptr1 + (x0), tmp3, xmask)
""", device_str='cuda')
'''
CUDA = """
class Runner:
    def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        args.clear()
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            FIRST
            buf1 = empty_strided_cuda((8, ), (1, ), torch.float32)
            buf2 = empty_strided_cuda((8, ), (1, ), torch.float32)
            stream0 = get_raw_stream(0)
            SECOND
        return (arg0_1, buf1, buf2, )
"""
WAIT = "torch.ops._c10d_functional.wait_tensor.default(arg2_1)"
LAUNCH = "triton_poi_fused_add_clone_0.run(arg0_1, arg1_1, arg2_1, buf1, buf2, 8, stream=stream0)"


def test_a_triton_kernel_says_what_it_reads_writes_and_copies() -> None:
    kernel = read_kernel(ast.parse(TRITON).body[0])
    assert kernel is not None
    assert [a.name for a in kernel.arguments if a.reads and a.sure] == ["in_out_ptr0", "in_ptr0", "in_ptr1"]
    assert [a.name for a in kernel.arguments if a.writes and a.sure] == ["in_out_ptr0", "out_ptr0", "out_ptr1"]
    assert kernel.copies == {3: {1}}  # the other output is rows picked by data


def test_code_for_a_gpu_is_read() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        return [x + y, torch.ops._c10d_functional.wait_tensor.default(z)]

    gm = make_fx(function, tracing_mode="fake")(*(torch.randn(8) for _ in range(3)))
    promise = Promise.of(gm, Context(phase="inference", process_group="0"))

    def code(first: str, second: str) -> str:
        return TRITON + CUDA.replace("FIRST", first).replace("SECOND", second)

    assert check_code(code(WAIT, LAUNCH), promise) == {}
    with pytest.raises(VerificationError, match=r"triton_poi_fused_add_clone_0.run"):
        check_code(code(LAUNCH.replace("buf1", "arg0_1").replace("buf2", "arg0_1"), WAIT), promise)
