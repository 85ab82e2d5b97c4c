"""Small questions to a GPU that training alone does not answer, each a function that returns a line.

They run small on a CPU as well, with kernels in Triton's interpreter. What asks for a stream or for the host's waits
says there that it was not run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerofx
from benchmarks.gpu.lines import Line, Setting, at_most, not_run, told
from benchmarks.gpu.training import difference
from tests.models import GPT
from zerofx.kernels import adamw, norm, wire
from zerofx.kernels.code import Code
from zerofx.kernels.runs import Buffers
from zerofx.kernels.segments import make_tiles

ROOT = Path(__file__).resolve().parents[2]
OFF = 1e-4
"""Of a loss, relative, from plain PyTorch's."""
Step = Callable[[torch.Tensor, torch.optim.Optimizer], None]


class Trained:
    """What the probes train: one rank, a small GPT."""

    def __init__(self, setting: Setting) -> None:
        self.small = setting.small
        self.device = torch.device("cpu")
        if setting.device == "cuda":
            self.device = torch.device("cuda", 0)
            torch.cuda.set_device(self.device)
        store = f"file://{tempfile.mkdtemp()}/store"
        dist.init_process_group(setting.backend, init_method=store, rank=0, world_size=1)
        if setting.small:
            norm.PARTIAL_SUMS = 8  # a program of the interpreter's takes milliseconds

    def model(self) -> GPT:
        torch.manual_seed(0)
        of = {"layers": 1, "dim": 16, "heads": 2, "vocab": 32, "length": 8}
        if not self.small:
            of = {"layers": 2, "dim": 128, "heads": 4, "vocab": 512, "length": 64}
        with self.device:
            return GPT(**of)

    def compiled(self, stage: int, executor: str = "eager", **options: Any) -> Any:
        torch._dynamo.reset()
        return zerofx.compile(self.model(), stage=stage, executor=executor, **options)  # type: ignore[arg-type]

    def batch(self, step: int) -> torch.Tensor:
        vocab, length = (32, 8) if self.small else (512, 64)
        return torch.randint(vocab, (2, 4, length), generator=torch.Generator().manual_seed(step)).to(self.device)

    def losses(self, model: Any, optimizer: torch.optim.Optimizer, update: Step | None = None) -> list[float]:
        found = []
        for i in range(4):
            loss = model(*self.batch(i))
            if update is None:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                update(loss, optimizer)
            found.append(loss.item())
        return found

    def plain(self, clip: bool = True) -> list[float]:
        """PyTorch's own."""

        def update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        model = self.model()
        return self.losses(model, torch.optim.AdamW(model.parameters(), lr=1e-3), update)


def step_in_backward(setting: Setting) -> Line:
    of = Trained(setting)
    wanted, off = of.plain(clip=False), []

    def update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        with zerofx.step_in_backward(optimizer):
            loss.backward()

    for stage in (3, 2, 1):
        model = of.compiled(stage)
        off.append(difference(of.losses(model, zerofx.AdamW(model.parameters(), lr=1e-3), update), wanted))
    return at_most("step_in_backward, stages 1 to 3: losses off plain PyTorch's", max(off), OFF)


def nan_stays_nan(setting: Setting) -> Line:
    of = Trained(setting)
    hidden: list[str] = []
    for options in ({}, {"master": "split"}, {"master": None}, {"moments": torch.bfloat16}, {"moments": "8bit"}):
        p = torch.nn.Parameter(torch.ones(8192, dtype=torch.bfloat16, device=of.device))
        optimizer = zerofx.AdamW([p], lr=1e-2, **options)  # type: ignore[arg-type]
        p.grad = torch.ones_like(p)
        p.grad[3] = torch.nan
        optimizer.step()
        state = {
            "weight": p.detach(),
            **{k: x for k, x in optimizer.state[p].items() if k in ("exp_avg", "exp_avg_sq")},
        }
        hidden += [f"{name} with {options}" for name, x in state.items() if not x.flatten()[3].isnan()]
    for name in ("int8", "fp8", "int4"):
        x = torch.ones(1, 256, device=of.device)
        x[0, 3] = torch.nan
        code = Code(name)  # type: ignore[arg-type]
        out = torch.empty(1, code.nbytes(256), dtype=torch.uint8, device=of.device)
        wire.encode(x, code, out)
        wire.decode(out, code, decoded := torch.empty_like(x, dtype=torch.bfloat16))
        hidden += [f"{name} on the wire"] * (not decoded.isnan().all())
    return _nothing("a NaN that is hidden: weights, moments, codes", hidden)


def host_waits(setting: Setting) -> Line:
    name = "waits of the host in a step: plain, a scheduler, clip_grad_norm_, a tensor as lr"
    if setting.device == "cpu":
        return not_run(name, "none")
    of, waits = Trained(setting), []
    for case in ("plain", "a scheduler", "clip_grad_norm_", "a tensor as lr"):
        model = of.compiled(3)
        lr: Any = torch.tensor(1e-3, device=of.device) if case == "a tensor as lr" else 1e-3
        optimizer = zerofx.AdamW(model.parameters(), lr=lr, max_grad_norm=None if case == "clip_grad_norm_" else 1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        batches = [of.batch(i) for i in range(4)]
        for i, batch in enumerate(batches):
            torch.cuda.set_sync_debug_mode("error" if i == 3 else "default")
            try:
                model(*batch).backward()
                if case == "clip_grad_norm_":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if case == "a scheduler":
                    scheduler.step()
            except RuntimeError as error:
                waits.append(f"{case}: {str(error).splitlines()[0][:80]}")
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return _nothing(name, waits)


def small_promises(setting: Setting) -> Line:
    of, broken = Trained(setting), []

    def stepped(gradients: list[float], dtype: torch.dtype = torch.float32, **options: Any) -> list[Any]:
        p = torch.nn.Parameter(torch.ones(4096, dtype=dtype, device=of.device))
        optimizer, norms = zerofx.AdamW([p], lr=1e-2, **options), []
        for value in gradients:
            p.grad = torch.full_like(p, value)
            optimizer.step()
            norms.append(optimizer.grad_norm)
        if not gradients:
            optimizer.step()
        return norms

    promises: dict[str, Callable[[], object]] = {
        "seed=20240101": lambda: stepped([1.0], seed=20240101, moments=torch.bfloat16),
        "float64": lambda: stepped([1.0], torch.float64),
        "a step without gradients": lambda: stepped([]),
    }
    for name, keep in promises.items():
        try:
            keep()
        except Exception as error:  # what a probe is for
            broken.append(f"{name}: {type(error).__name__}: {str(error)[:80]}")
    norms = [x.item() for x in stepped([1.0, 2.0, 3.0], max_grad_norm=1.0)]
    if norms != [64.0, 128.0, 192.0]:
        broken.append(f"grad_norm, read after three steps: {norms}")
    return _nothing("seeds, float64, steps without gradients, norms that are kept: what is broken", broken)


def many_parameters(setting: Setting) -> Line:
    """One launch for all of them: the host's time is its Python."""
    of, said, seconds = Trained(setting), [], 0.0
    for count in (8,) if setting.small else (1000, 8000):
        parameters = [torch.nn.Parameter(torch.ones(8, device=of.device)) for _ in range(count)]
        optimizer, times = zerofx.AdamW(parameters, lr=1e-2), []
        for p in parameters:
            p.grad = torch.ones_like(p)
        for _ in range(4):
            _done(of.device)
            began = time.perf_counter()
            optimizer.step()
            _done(of.device)
            times.append(time.perf_counter() - began)
        seconds = min(times)
        said.append(f"{count}: first {times[0]:.1f} s, then {1e3 * seconds:.0f} ms")
    return told("a step of so many parameters of 8 elements", "; ".join(said), seconds)


def beyond_int32(setting: Setting) -> Line:
    """The last elements of a run of more than 2^31 are updated and counted as those of a short one."""
    of, tail = Trained(setting), 4096
    numel = tail if setting.small else 2**31 + tail
    hyper = torch.tensor([[1e-2, 0.9, 0.999, 1e-8, 0, 0.1, 0.001**0.5, 1]], dtype=torch.float64, device=of.device)
    last = torch.linspace(-2, 2, tail, device=of.device).bfloat16()

    def stepped(numel: int) -> tuple[torch.Tensor, float]:
        p, grad = (torch.ones(numel, dtype=torch.bfloat16, device=of.device) for _ in range(2))
        grad[-tail:] = last
        buffers = Buffers(p, torch.zeros_like(p), torch.zeros_like(p))
        runs = torch.tensor([buffers.row(0, grad.data_ptr(), 0, 0)], device=of.device)
        tiles, control = make_tiles([[(0, numel, 0)]]).to(of.device), torch.tensor([1.0, 0, 0, 0], device=of.device)
        seeds = torch.zeros(1, dtype=torch.int64, device=of.device)
        adamw.adamw(buffers.kind(grad.dtype), runs, tiles, hyper, control, seeds)
        parts = torch.zeros(norm.PARTIAL_SUMS, dtype=torch.float64, device=of.device)
        norm.partial_sums(grad.dtype, runs, tiles, parts)
        return p[-tail:].clone(), parts.sum().item()

    (short, _), (long, total) = stepped(tail), stepped(numel)
    broken = [] if torch.equal(short, long) else [f"{int((short != long).sum())} of the last {tail} elements differ"]
    wanted = numel - tail + last.double().square().sum().item()
    if abs(total / wanted - 1) > 1e-9:
        broken.append(f"the sum of squares is {total}, not {wanted}")
    return _nothing(f"{numel:,} elements: what differs", broken)


def same_bits(setting: Setting) -> Line:
    of, weights = Trained(setting), []
    for _ in range(2):
        model = of.compiled(3)
        of.losses(model, zerofx.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, moments="8bit"))
        weights.append([p.full_tensor().clone() for p in model.parameters()])
    same = all(map(torch.equal, *weights))
    return told("two runs with 8-bit moments", "the same bits" if same else "differ, as PyTorch's backward may")


def saved_and_loaded(setting: Setting) -> Line:
    of, off = Trained(setting), []
    for stage in (3, 2, 0):
        for background in (False, True):
            model = of.compiled(stage)
            optimizer = zerofx.AdamW(model.parameters(), lr=1e-3)
            of.losses(model, optimizer)
            with tempfile.TemporaryDirectory() as folder:
                saved = zerofx.save(f"{folder}/run", model, optimizer, step=4, background=background)
                where: Any = saved.result() if hasattr(saved, "result") else saved
                wanted = of.losses(model, optimizer)
                zerofx.load(where, model, optimizer)
                off.append(difference(of.losses(model, optimizer), wanted))
    return at_most("saved, also in the background, and loaded: losses off those of the run", max(off), 1e-6)


def a_stream_of_the_users(setting: Setting) -> Line:
    name = "forward and backward on a stream of the user's: losses off plain PyTorch's"
    if setting.device == "cpu":
        return not_run(name, f"at most {OFF}")
    of = Trained(setting)
    model, side, losses = of.compiled(2), torch.cuda.Stream(), []
    optimizer = zerofx.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    for i in range(4):
        batch = of.batch(i)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = model(*batch)
            loss.backward()
        torch.cuda.current_stream().wait_stream(side)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return at_most(name, difference(losses, of.plain()), OFF)


def warm_start(setting: Setting) -> list[Line]:
    """Two processes with one cache."""
    found = []
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as folder:
        for turn in ("cold", "warm"):
            path = Path(folder) / turn
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
            command = [sys.executable, "-m", "benchmarks.gpu.probes", "started", setting.device, str(path)]
            ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            if not path.exists():
                raise RuntimeError(f"the {turn} start wrote nothing: {ended.stderr[-3000:]}")
            found.append(json.loads(path.read_text()))
    cold, warm = found
    seconds = ", ".join(f"{name} {cold[name]['s']:.1f} s and {warm[name]['s']:.1f} s" for name in warm)
    missed = [name for name, of in warm.items() if not of["hits"] or of["misses"]]
    off = max(difference(warm[name]["losses"], cold[name]["losses"]) for name in warm)
    return [
        told("a first start and a second one, until four steps are done", seconds),
        _nothing("a second start: what was compiled anew", missed),
        at_most("a second start: losses off the first's", off, 1e-6),
    ]


def started(setting: Setting) -> dict[str, Any]:
    """What `warm_start` compares, of one process."""
    from torch._dynamo.utils import counters

    of, found = Trained(setting), {}
    for stage, executor in ((3, "inductor"), (3, "eager"), (0, "inductor")):
        counters.clear()
        began = time.perf_counter()
        model = of.compiled(stage, executor)
        losses = of.losses(model, zerofx.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0))
        seen = counters["aot_autograd"]
        found[f"stage {stage}, {executor}"] = {
            **{"s": time.perf_counter() - began, "losses": losses},
            **{"hits": seen["autograd_cache_hit"], "misses": seen["autograd_cache_miss"]},
        }
    return found


def _nothing(name: str, found: list[str]) -> Line:
    return Line(name, "nothing", "; ".join(found)[:500] or "nothing", "otherwise" if found else "as expected")


def _done(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


PROBES: dict[str, Callable[[Setting], Line | list[Line]]] = {
    probe.__name__: probe  # type: ignore[attr-defined]
    for probe in (
        *(step_in_backward, nan_stays_nan, host_waits, warm_start, small_promises, beyond_int32),
        *(saved_and_loaded, a_stream_of_the_users, many_parameters, same_bits),
    )
}
"""The most telling first."""


def main() -> None:
    """``python -m benchmarks.gpu.probes PROBE DEVICE PATH``: its lines, as JSON, to that path."""
    name, device, path = sys.argv[1:]
    setting = Setting(device, 1, tempfile.gettempdir())
    if name == "started":
        text = json.dumps(started(setting))
    else:
        made = PROBES[name](setting)
        text = json.dumps([vars(line) for line in (made if isinstance(made, list) else [made])])
    whole = Path(f"{path}.part")
    whole.write_text(text)
    whole.rename(path)
    os._exit(0)  # threads of a process group may keep an interpreter from ending


if __name__ == "__main__":
    main()
