"""What only code for a GPU has: Triton's kernels, streams, inputs that may lie at odd addresses."""

from __future__ import annotations

import re

from tests.passes.code_mutants import Collective, Text, breaks, reductions, released


def on_gpu(text: Text) -> bool:
    return bool(text.find(r"_DeviceGuard"))


_KERNEL = """
triton_poi_fused_{name}_900 = async_compile.triton('triton_poi_fused_{name}_900', '''
@triton.jit
def triton_poi_fused_{name}_900({arguments}, xnumel, XBLOCK : tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x0 = xindex
{body}
''', device_str='cuda')
"""


def add_kernel(text: Text, name: str, arguments: str, *body: str) -> str:
    """A kernel of that name, in the module; how it is called."""
    at = next(i for i, line in enumerate(text.lines) if line.startswith("async_compile.wait("))
    kernel = _KERNEL.format(name=name, arguments=arguments, body="\n".join(f"    {line}" for line in body))
    text.lines[at:at] = kernel.splitlines()
    return f"triton_poi_fused_{name}_900.run"


def _weights(text: Text) -> list[Collective]:
    return [each for each, _, _ in released(text)] if on_gpu(text) else []


def _copy_by(text: Text, each: Collective, load: str) -> None:
    numel = re.search(r"\((\d+),", text.lines[text.asserts(each)[0]])[1]  # type: ignore[index]
    i = text.find(rf"wait_tensor\.default\({each.brought}\)")[0]
    text.insert(
        i + 1,
        f"buf900 = empty_strided_cuda(({numel}, ), (1, ), torch.float32)",
        "stream900 = get_raw_stream(0)",
        f"triton_poi_fused_clone_900.run({each.brought}, buf900, {numel}, stream=stream900)",
    )
    add_kernel(text, "clone", "in_ptr0, out_ptr0", load, "tl.store(out_ptr0 + (x0), tmp0, xmask)")


@breaks("copy", _weights)
def weights_are_copied_by_a_triton_kernel(text: Text, each: Collective) -> None:
    _copy_by(text, each, "tmp0 = tl.load(in_ptr0 + (x0), xmask)")


@breaks("copy", _weights)
def weights_are_copied_and_cast_by_a_triton_kernel(text: Text, each: Collective) -> None:
    _copy_by(text, each, "tmp0 = tl.load(in_ptr0 + (x0), xmask).to(tl.float32)")


@breaks("wait", lambda text: on_gpu(text) and text.collectives())
def what_is_under_way_is_copied_if_misaligned(text: Text, each: Collective) -> None:
    text.insert(each.wait, f"buf900 = copy_if_misaligned({each.brought})")


@breaks("wait", lambda text: on_gpu(text) and text.collectives())
def what_is_under_way_is_read_by_a_triton_kernel(text: Text, each: Collective) -> None:
    run = f"triton_poi_fused_sum_900.run({each.brought}, 4, stream=stream900)"
    text.insert(each.wait, "stream900 = get_raw_stream(0)", run)
    add_kernel(text, "sum", "in_ptr0", "tmp0 = tl.load(in_ptr0 + (x0), xmask)")


def _launches(text: Text) -> list[tuple[int, str]]:
    """Launches of Triton's kernels that read weights."""
    return [
        (i, each.brought)
        for each in _weights(text)
        for i in text.calls(each.brought, each.wait)
        if re.search(r"triton_\w+\.run\(", text.lines[i])
    ]


@breaks("wait", _launches)
def a_launch_on_a_stream_of_its_own(text: Text, place: tuple[int, str]) -> None:
    text.lines[place[0]] = re.sub(r"stream=\w+\)", "stream=side_stream.cuda_stream)", text.lines[place[0]])


@breaks("wait", lambda text: [place for each, _, read in released(text) if on_gpu(text) for place in [(read, each)]])
def weights_are_read_inside_of_another_stream(text: Text, place: tuple[int, Collective]) -> None:
    text.insert(place[0], "with torch.cuda.stream(side_stream):")
    text.lines[place[0] + 1] = "    " + text.lines[place[0] + 1]


@breaks("wait", lambda text: on_gpu(text) and text.collectives())
def a_wait_on_another_stream(text: Text, each: Collective) -> None:
    text.insert(each.wait, "with torch.cuda.stream(torch.cuda.Stream()):")
    text.lines[each.wait + 1] = "    " + text.lines[each.wait + 1]


@breaks("wait", lambda text: on_gpu(text) and text.collectives())
def a_start_on_another_stream(text: Text, each: Collective) -> None:
    text.insert(each.line, "with torch.cuda.stream(torch.cuda.Stream()):")
    text.lines[each.line + 1] = "    " + text.lines[each.line + 1]


@breaks("send", lambda text: reductions(text) if on_gpu(text) else [])
def what_is_sent_is_written_by_a_triton_kernel(text: Text, each: Collective) -> None:
    run = f"triton_poi_fused_zeros_900.run({each.sent}, 4, stream=stream900)"
    text.insert(each.line + 1, "stream900 = get_raw_stream(0)", run)
    add_kernel(text, "zeros", "out_ptr0", "tl.store(out_ptr0 + (x0), 0.0, xmask)")


@breaks("send", lambda text: reductions(text) if on_gpu(text) else [])
def what_is_sent_is_scaled_in_place_by_a_triton_kernel(text: Text, each: Collective) -> None:
    run = f"triton_poi_fused_mul_900.run({each.sent}, 4, stream=stream900)"
    text.insert(each.line + 1, "stream900 = get_raw_stream(0)", run)
    body = ("tmp0 = tl.load(in_out_ptr0 + (x0), xmask)", "tl.store(in_out_ptr0 + (x0), tmp0 * 2, xmask)")
    add_kernel(text, "mul", "in_out_ptr0", *body)


@breaks("discard", lambda text: released(text) if on_gpu(text) else [])
def weights_are_written_by_a_triton_kernel(text: Text, place: tuple[Collective, int, int]) -> None:
    run = f"triton_poi_fused_zeros_900.run({place[0].brought}, 4, stream=stream900)"
    text.insert(place[2], "stream900 = get_raw_stream(0)", run)
    add_kernel(text, "zeros", "out_ptr0", "tl.store(out_ptr0 + (x0), 0.0, xmask)")


@breaks("order", lambda text: on_gpu(text) and text.collectives("all_gather"))
def a_gather_of_a_part_of_the_shard(text: Text, each: Collective) -> None:
    part = f"reinterpret_tensor({each.sent}, (8, ), (1, ), 0)"
    text.lines[each.line] = text.lines[each.line].replace(f"default({each.sent},", f"default({part},")


@breaks("order", lambda text: reductions(text) if on_gpu(text) else [])
def an_all_reduce_in_the_place_of_a_reduction(text: Text, each: Collective) -> None:
    text.lines[each.line] = text.lines[each.line].replace("reduce_scatter_tensor", "all_reduce")
