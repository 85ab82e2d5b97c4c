"""Waits, what is sent, the order of starts, lines nobody knows: the rules "wait", "send", "order" and "read"."""

from __future__ import annotations

import re
from itertools import pairwise

from tests.passes.code_mutants import KERNEL, START, Collective, Places, Text, breaks, not_updated, reductions

# ---- wait -----------------------------------------------------------------------------------------------------------


def _waits(text: Text) -> list[tuple[int, str]]:
    return text.waits()


def _read_waits(text: Text) -> list[tuple[int, int, str]]:
    """Wait, the first reader behind it, and what of."""
    return [(i, reads[0], name) for i, name in text.waits() if (reads := text.calls(name, i))]


def _early_calls(text: Text) -> list[tuple[int, str, str]]:
    """A call between the start of a gather and its wait, which reads another; that, and what is under way."""
    gathers, found = text.collectives("all_gather"), []
    for gather in gathers:
        for other in gathers:
            calls = [i for i in text.calls(other.brought, max(gather.line, other.wait), gather.wait)]
            found += [(calls[-1], other.brought, gather.brought)] if calls and other is not gather else []
    return found


def _early_outputs(text: Text) -> list[tuple[int, str]]:
    """A product between the start of a collective and its wait, and what that brings."""
    found = []
    for each in text.collectives():
        products = text.find(r"extern_kernels.*out=\w+\)", each.line + 3, each.wait)
        found += [(products[0], each.brought)] if products else []
    return found


@breaks("wait", _waits)
def a_dropped_wait(text: Text, wait: tuple[int, str]) -> None:
    del text.lines[wait[0]]


@breaks("wait", _waits)
def a_doubled_wait(text: Text, wait: tuple[int, str]) -> None:
    text.lines.insert(wait[0], text.lines[wait[0]])


@breaks("wait", _read_waits)
def a_wait_behind_the_first_reader(text: Text, place: tuple[int, int, str]) -> None:
    text.move(place[0], place[1] + 1)


@breaks("wait", _read_waits)
def a_wait_at_the_end(text: Text, place: tuple[int, int, str]) -> None:
    for i in text.dels(place[2]):
        text.lines[i] = ""
    text.move(place[0], text.end)


@breaks("wait", lambda text: [(p, q) for p, q in zip(text.waits(), text.waits()[1:]) if text.calls(p[1], p[0], q[0])])
def two_waits_exchanged(text: Text, place: tuple[tuple[int, str], tuple[int, str]]) -> None:
    text.exchange(place[0][0], place[1][0], r"default\((\w+)\)")


@breaks("wait", lambda text: list(zip(text.waits(), text.waits()[1:])))
def a_wait_for_what_has_come_in_the_place_of_another(
    text: Text, place: tuple[tuple[int, str], tuple[int, str]]
) -> None:
    text.rename(place[1][0], place[1][1], place[0][1])


@breaks("wait", lambda text: [c for c in text.collectives() if not text.find(START, c.line + 1, c.wait)])
def a_start_behind_its_wait(text: Text, each: Collective) -> None:
    moved = [i for i in text.start_lines(each) if i not in text.asserts(each)]
    lines = [text.lines[i].strip() for i in moved if text.lines[i].strip() != f"del {each.result}"]
    for i in [*text.dels(each.sent), *text.start_lines(each)]:
        text.lines[i] = ""
    text.insert(each.wait + 1, *lines)


@breaks("wait", _early_calls)
def a_kernel_reads_what_is_under_way(text: Text, place: tuple[int, str, str]) -> None:
    text.rename(*place)


@breaks("wait", _early_outputs)
def a_product_is_written_to_what_is_under_way(text: Text, place: tuple[int, str]) -> None:
    text.lines[place[0]] = re.sub(r"out=\w+\)", f"out={place[1]})", text.lines[place[0]])


@breaks("wait", lambda text: text.collectives())
def what_is_under_way_is_summed(text: Text, each: Collective) -> None:
    text.insert(each.wait, f"buf900 = torch.ops.aten.sum.default(reinterpret_tensor({each.brought}, (4, ), (1, ), 0))")


@breaks("wait", lambda text: text.collectives())
def what_is_under_way_is_read_by_something_unknown(text: Text, each: Collective) -> None:
    text.insert(each.wait, f"buf900 = somebodys.kernel(x={each.brought})")


@breaks("wait", lambda text: text.collectives("all_gather"))
def what_is_under_way_is_gathered(text: Text, each: Collective) -> None:
    text.insert(each.wait, f"buf900 = torch.ops.zerofx.own_part.default({each.brought}, 2, '0')", "buf900.zero_()")


@breaks("wait", lambda text: not_updated(text) and not text.find(r"zerofx\.offload\.") and reductions(text)[-1:])
def what_is_under_way_is_returned(text: Text, each: Collective) -> None:
    text.lines[text.end] = text.lines[text.end].replace("return (", f"return ({each.brought}, ")
    for i in [each.wait, *text.calls(each.brought), *text.dels(each.brought)]:
        text.lines[i] = ""


# ---- send -----------------------------------------------------------------------------------------------------------


def _filled(text: Text) -> list[tuple[Collective, int]]:
    """Reductions, and the last call that writes to what they send, with no other start between."""
    found = []
    for each in text.collectives("all_to_all"):
        writers = [i for name in text.aliases(each.sent) for i in text.calls(name, 0, each.line)]
        if writers and not text.find(START, max(writers), each.line):
            found.append((each, max(writers)))
    return found


def _outputs_behind(text: Text) -> list[tuple[int, str]]:
    """A product between the start of a reduction and its wait, and what is sent."""
    found = []
    for each in text.collectives("all_to_all"):
        products = text.find(r"extern_kernels.*out=\w+\)", each.line, each.wait)
        found += [(products[0], each.sent)] if products else []
    return found


@breaks("send", _filled)
def a_start_before_all_is_packed(text: Text, place: tuple[Collective, int]) -> None:
    text.move(place[0].line, place[1])


@breaks("send", _outputs_behind)
def a_product_is_written_over_what_is_sent(text: Text, place: tuple[int, str]) -> None:
    text.lines[place[0]] = re.sub(r"out=\w+\)", f"out={place[1]})", text.lines[place[0]])


@breaks("send", reductions)
def what_is_sent_is_set_to_zero(text: Text, each: Collective) -> None:
    text.insert(each.line + 1, f"torch.ops.aten.zero_.default({each.sent})")


@breaks("send", reductions)
def what_is_sent_is_scaled_before_the_wait(text: Text, each: Collective) -> None:
    text.insert(each.wait, f"aten.mul_({each.sent}, 0.5)")


@breaks("send", reductions)
def what_is_sent_is_written_through_a_view(text: Text, each: Collective) -> None:
    text.insert(each.wait, f"torch.ops.aten.zero_.default(reinterpret_tensor({each.sent}, (4, ), (1, ), 8))")


@breaks("send", reductions)
def what_is_sent_is_used_again_for_something_else(text: Text, each: Collective) -> None:
    text.insert(each.wait, f"buf900 = {each.sent}", "torch.ops.aten.fill_.Scalar(buf900, 0.0)")


@breaks("send", lambda text: text.collectives("all_gather"))
def a_shard_is_written_while_it_is_sent(text: Text, each: Collective) -> None:
    text.insert(each.line + 1, f"{each.sent}.copy_({each.sent})")


# ---- order ----------------------------------------------------------------------------------------------------------


def _pairs(kind: str) -> Places:
    """Neighbouring starts whose inputs are there before both, without a wait or a kernel between."""

    def find(text: Text) -> list[tuple[Collective, Collective]]:
        all_ = text.collectives(kind)
        between = rf"wait_tensor|{KERNEL}"
        return [(a, b) for a, b in pairwise(all_) if not text.find(between, a.line, b.line)]

    return find


def _successive(text: Text) -> list[tuple[Collective, Collective]]:
    """A collective, and the next to start, while the first is under way."""
    all_ = text.collectives()
    return [(a, b) for a, b in pairwise(all_) if a.wait > b.line]


def _sums(text: Text) -> list[tuple[str, str]]:
    """Neighbouring outputs that are sums over ranks, each of a kernel that reads one collective's alone."""
    names = [name for name in re.findall(r"\w+", text.lines[text.end]) if name not in ("return", "None")]
    brought = [each.brought for each in text.collectives("all_to_all")]
    found = []
    for name in names:
        writers = text.calls(name)
        reads = [b for b in brought for i in writers if re.search(rf"\b{b}\b", text.lines[i])]
        if len(reads) == 1:
            found.append(name)
    return list(pairwise(found))


@breaks("order", _pairs("all_gather"))
def two_starts_exchanged(text: Text, place: tuple[Collective, Collective]) -> None:
    first, second = place
    for i in text.dels(first.sent) + text.dels(second.sent):
        text.lines[i] = ""
    moved = text.start_lines(first)
    lines = [text.lines[i].strip() for i in moved]
    for i in moved:
        text.lines[i] = ""
    text.insert(second.line + 1, *lines)


@breaks("order", lambda text: not text.find(r"zerofx\.reload\.") and _pairs("all_gather")(text))
def two_shards_exchanged(text: Text, place: tuple[Collective, Collective]) -> None:
    for each in place:
        for i in text.dels(each.sent):
            text.lines[i] = ""
    text.exchange(place[0].line, place[1].line, r"default\((\w+),")


@breaks("order", lambda text: text.collectives())
def a_doubled_start(text: Text, each: Collective) -> None:
    text.insert(each.line, text.lines[each.line].strip().replace(f"{each.result} =", "buf900 ="))


@breaks("order", lambda text: not_updated(text) and _successive(text))
def a_start_behind_the_next(text: Text, place: tuple[Collective, Collective]) -> None:
    first, second = place
    moved = text.start_lines(first)
    moved += [i for i in text.dels(first.sent) if i < second.line]
    lines = [text.lines[i].strip() for i in sorted(moved)]
    for i in moved:
        text.lines[i] = ""
    text.insert(second.line + 1, *lines)


@breaks("order", lambda text: text.collectives("all_gather"))
def another_collective_in_its_place(text: Text, each: Collective) -> None:
    line = text.lines[each.line].replace("all_gather_pairwise", "all_to_all_pairwise")
    text.lines[each.line] = line.replace("all_gather_into_tensor", "all_reduce")


@breaks("order", lambda text: not_updated(text) and text.collectives()[-1:])
def a_start_that_is_gone_with_its_wait(text: Text, each: Collective) -> None:
    text.lines[each.line] = f"{text.margin}{each.result} = empty_strided_cpu((4, ), (1, ), torch.float32)"
    text.lines[each.wait] = ""


@breaks("order", reductions)
def a_reduction_of_a_part_of_the_pack(text: Text, each: Collective) -> None:
    part = f"reinterpret_tensor({each.sent}, (8, ), (1, ), 0)"
    text.lines[each.line] = text.lines[each.line].replace(f"default({each.sent},", f"default({part},")


@breaks("order", _sums)
def two_sums_exchanged(text: Text, place: tuple[str, str]) -> None:
    line = re.sub(rf"\b{place[0]}\b", "TEMPORARY", text.lines[text.end])
    line = re.sub(rf"\b{place[1]}\b", place[0], line)
    text.lines[text.end] = line.replace("TEMPORARY", place[1])


@breaks(
    "order",
    lambda text: [(i, s) for i in text.find(r"= torch\.ops\.zerofx\.refresh") for s in text.find(START, i + 1)[:1]],
)
def a_refresh_behind_the_next_start(text: Text, place: tuple[int, int]) -> None:
    result = re.search(r"(\w+) =", text.lines[place[0]])[1]  # type: ignore[index]
    line = text.lines[place[0]].strip()
    aliases = [re.search(r"(\w+) =", text.lines[i])[1] for i in text.find(rf"= {result}$")]  # type: ignore[index]
    for i in text.find(rf"\b(?:{'|'.join([result, *aliases])})\b", 0, place[1]):
        text.lines[i] = ""
    argument = re.search(r"default\((\w+),", line)[1]  # type: ignore[index]
    for i in text.dels(argument):
        text.lines[i] = ""
    text.insert(place[1] + 1, line)


# ---- read -----------------------------------------------------------------------------------------------------------


@breaks("read", lambda text: text.collectives())
def a_statement_of_an_unknown_kind(text: Text, each: Collective) -> None:
    text.insert(each.wait + 1, f"buf900: object = {each.brought}")


@breaks("read", lambda text: text.find(r"^\s*\w+ = empty_strided")[::8])
def memory_that_is_not_there(text: Text, i: int) -> None:
    del text.lines[i]


@breaks("read", lambda text: [text.begin - 2])
def an_input_more(text: Text, i: int) -> None:
    text.lines[i] = text.lines[i].replace(" = args", ", arg900 = args").replace(",, ", ", ")
