"""Ways to break generated code, as text: each in the name of the rule of `zerofx.passes.proof.code` that must find it.

A mutant is a function that breaks a text at a place, and another that says what places there are in it::

    @breaks("wait", waits)
    def a_dropped_wait(text, wait):
        del text.lines[wait.line]

Lines are found by expressions of this file's own, so that what the reader overlooks is not overlooked here, too. A place
is left out where the mutant would be the same program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Collective:
    """A collective of a text: the lines of its start and its wait, what it sends, what it brings, by name."""

    line: int
    wait: int
    sent: str
    brought: str
    result: str

    def __hash__(self) -> int:
        return hash(self.line)


class Text:
    """A generated module, of which ``lines`` may be changed; the rest is read from them when asked."""

    def __init__(self, code: str) -> None:
        self.lines = code.splitlines()

    @property
    def code(self) -> str:
        return "\n".join(self.lines)

    @property
    def begin(self) -> int:
        """Behind ``args.clear()``."""
        return next(i for i, line in enumerate(self.lines) if "args.clear()" in line) + 1

    @property
    def end(self) -> int:
        """The line that returns."""
        return next(i for i in range(self.begin, len(self.lines)) if re.match(r"\s*return \(", self.lines[i]))

    def find(self, expression: str, first: int = 0, last: int | None = None) -> list[int]:
        """The lines of the function that have it."""
        first, last = max(first, self.begin), self.end if last is None else last
        return [i for i in range(first, last) if re.search(expression, self.lines[i])]

    def waits(self) -> list[tuple[int, str]]:
        found = self.find(r"wait_tensor\.default\(\w+\)")
        return [(i, re.search(r"default\((\w+)\)", self.lines[i])[1]) for i in found]  # type: ignore[index]

    def collectives(self, kind: str = "all_gather|all_to_all") -> list[Collective]:
        found = []
        for i in self.find(rf"= torch\.ops\.zerofx\.(?:{kind})_pairwise"):
            result, sent = re.search(r"(\w+) = [\w.]+\((\w+),", self.lines[i]).groups()  # type: ignore[union-attr]
            brought = re.search(r"(\w+) =", self.lines[self.find(rf"^\s*\w+ = {result}$")[0]])[1]  # type: ignore[index]
            wait = next(line for line, name in self.waits() if name == brought)
            found.append(Collective(i, wait, sent, brought, result))
        return found

    def calls(self, name: str, first: int = 0, last: int | None = None) -> list[int]:
        """Kernels, products and operators that name ``name``."""
        found = self.find(rf"\b{name}\b", first, last)
        calls = re.compile(r"^\s*(\w+ = )?(cpp_fused\w*\(|extern_kernels\.|torch\.ops\.aten\.)")
        return [i for i in found if calls.search(self.lines[i])]

    def dels(self, name: str) -> list[int]:
        return self.find(rf"^\s*del {name}$")

    def aliases(self, name: str) -> list[str]:
        """``name``, and views of it that have names."""
        found = [name]
        for i in self.find(r"# alias"):
            alias, of = re.search(r"(\w+) = reinterpret_tensor\((\w+),", self.lines[i]).groups()  # type: ignore[union-attr]
            if of == name:
                found.append(alias)
        return found

    def insert(self, i: int, *lines: str) -> None:
        """Before line ``i``."""
        self.lines[i:i] = ["        " + line for line in lines]

    def move(self, i: int, to: int) -> None:
        """Line ``i`` before line ``to``."""
        line = self.lines.pop(i)
        self.lines.insert(to - (i < to), line)

    def exchange(self, i: int, j: int, expression: str) -> None:
        """What ``expression`` finds in one line, for what it finds in the other."""
        here, there = re.search(expression, self.lines[i]), re.search(expression, self.lines[j])
        assert here is not None and there is not None
        for line, old, new in ((i, here, there), (j, there, here)):
            text = self.lines[line]
            self.lines[line] = text[: old.start(1)] + new[1] + text[old.end(1) :]

    def rename(self, i: int, old: str, new: str) -> None:
        self.lines[i] = re.sub(rf"\b{old}\b", new, self.lines[i])


Places = Callable[[Text], Sequence[Any]]
Break = Callable[[Text, Any], None]


@dataclass(frozen=True)
class Mutant:
    """A way to break a text: ``places`` finds where it can be done, ``break_`` does it at one of these."""

    rule: str
    places: Places
    break_: Break

    @property
    def name(self) -> str:
        return self.break_.__name__


MUTANTS: list[Mutant] = []


def breaks(rule: str, places: Places) -> Callable[[Break], Break]:
    """What the decorated function does, at any of ``places``, must be found by ``rule``."""

    def add(break_: Break) -> Break:
        MUTANTS.append(Mutant(rule, places, break_))
        return break_

    return add


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


@breaks("wait", lambda text: text.collectives())
def a_start_behind_its_wait(text: Text, each: Collective) -> None:
    for i in text.dels(each.sent) + text.dels(each.result):
        text.lines[i] = ""
    alias = text.find(rf"^\s*{each.brought} = {each.result}$")[0]
    text.lines[text.find(rf"assert_\w+\({each.brought},")[0]] = ""
    lines = [text.lines[i].strip() for i in (each.line, alias)]
    text.lines[each.line] = text.lines[alias] = ""
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


@breaks("wait", lambda text: text.collectives()[-1:])
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
        if writers and not text.find(r"_pairwise\.", max(writers), each.line):
            found.append((each, max(writers)))
    return found


def _outputs_behind(text: Text) -> list[tuple[int, str]]:
    """A product between the start of a reduction and its wait, and what is sent."""
    found = []
    for each in text.collectives("all_to_all"):
        products = text.find(r"extern_kernels.*out=\w+\)", each.line, each.wait)
        found += [(products[0], each.sent)] if products else []
    return found


def _reductions(text: Text) -> list[Collective]:
    return text.collectives("all_to_all")


@breaks("send", _filled)
def a_start_before_all_is_packed(text: Text, place: tuple[Collective, int]) -> None:
    text.move(place[0].line, place[1])


@breaks("send", _outputs_behind)
def a_product_is_written_over_what_is_sent(text: Text, place: tuple[int, str]) -> None:
    text.lines[place[0]] = re.sub(r"out=\w+\)", f"out={place[1]})", text.lines[place[0]])


@breaks("send", _reductions)
def what_is_sent_is_set_to_zero(text: Text, each: Collective) -> None:
    text.insert(each.line + 1, f"torch.ops.aten.zero_.default({each.sent})")


@breaks("send", _reductions)
def what_is_sent_is_scaled_before_the_wait(text: Text, each: Collective) -> None:
    text.insert(each.wait, f"aten.mul_({each.sent}, 0.5)")


@breaks("send", _reductions)
def what_is_sent_is_written_through_a_view(text: Text, each: Collective) -> None:
    text.insert(each.wait, f"torch.ops.aten.zero_.default(reinterpret_tensor({each.sent}, (4, ), (1, ), 8))")


@breaks("send", _reductions)
def what_is_sent_is_used_again_for_something_else(text: Text, each: Collective) -> None:
    text.insert(each.wait, f"buf900 = {each.sent}", "torch.ops.aten.fill_.Scalar(buf900, 0.0)")


@breaks("send", lambda text: text.collectives("all_gather"))
def a_shard_is_written_while_it_is_sent(text: Text, each: Collective) -> None:
    text.insert(each.line + 1, f"{each.sent}.copy_({each.sent})")


# ---- discard --------------------------------------------------------------------------------------------------------


def _released(text: Text) -> list[tuple[Collective, int, int]]:
    """Gathers, where they are let go, and their last reader."""
    found = []
    for each in text.collectives("all_gather"):
        dels, reads = text.dels(each.brought), text.calls(each.brought, each.wait)
        found += [(each, dels[0], reads[-1])] if dels and reads else []
    return found


def _released_before_a_start(text: Text) -> list[tuple[Collective, int, int]]:
    starts = [each.line for each in text.collectives()]
    return [place for place in _released(text) if any(line > place[1] for line in starts)]


def _later_products(text: Text) -> list[tuple[int, str, str]]:
    """A product behind the end of a gathered buffer, that reads another; and what is gone."""
    found = []
    for each, end, _ in _released(text):
        for other, later, _ in _released(text):
            calls = text.calls(other.brought, end, later)
            found += [(calls[0], other.brought, each.brought)] if calls else []
    return found


def _overwritable(text: Text) -> list[tuple[int, str]]:
    """A product behind the first reader of a gathered buffer, with another behind it."""
    found = []
    for each in text.collectives("all_gather"):
        products = [i for i in text.calls(each.brought, each.wait) if re.search(r"out=\w+\)", text.lines[i])]
        found += [(products[0], each.brought)] if len(products) > 1 else []
    return found


@breaks("discard", _released_before_a_start)
def a_dropped_release(text: Text, place: tuple[Collective, int, int]) -> None:
    del text.lines[place[1]]


@breaks("discard", _released_before_a_start)
def a_late_release(text: Text, place: tuple[Collective, int, int]) -> None:
    text.move(place[1], text.end)


@breaks("discard", _released_before_a_start)
def a_view_that_stays(text: Text, place: tuple[Collective, int, int]) -> None:
    text.insert(place[1], f"buf900 = reinterpret_tensor({place[0].brought}, (4, ), (1, ), 0)")


@breaks("discard", _released)
def a_release_before_the_last_reader(text: Text, place: tuple[Collective, int, int]) -> None:
    text.move(place[1], place[2])


@breaks("discard", _released)
def a_second_release(text: Text, place: tuple[Collective, int, int]) -> None:
    text.lines.insert(place[1], text.lines[place[1]])


@breaks("discard", _later_products)
def a_kernel_reads_what_was_let_go(text: Text, place: tuple[int, str, str]) -> None:
    text.rename(*place)


@breaks("discard", _overwritable)
def a_product_is_written_over_weights(text: Text, place: tuple[int, str]) -> None:
    text.lines[place[0]] = re.sub(r"out=\w+\)", f"out={place[1]})", text.lines[place[0]])


@breaks("discard", _released)
def weights_are_used_again_before_their_last_reader(text: Text, place: tuple[Collective, int, int]) -> None:
    text.insert(place[2], f"buf900 = {place[0].brought}", "torch.ops.aten.zero_.default(buf900)")


@breaks("discard", _released)
def weights_are_written_through_a_view(text: Text, place: tuple[Collective, int, int]) -> None:
    text.insert(place[2], f"torch.ops.aten.zero_.default(reinterpret_tensor({place[0].brought}, (4, ), (1, ), 0))")


# ---- order ----------------------------------------------------------------------------------------------------------


def _pairs(kind: str) -> Places:
    """Neighbouring starts whose inputs are there before both, without a wait or a kernel between."""

    def find(text: Text) -> list[tuple[Collective, Collective]]:
        all_ = text.collectives(kind)
        between = r"wait_tensor|cpp_fused|extern_kernels|torch\.ops\.aten"
        return [(a, b) for a, b in zip(all_, all_[1:]) if not text.find(between, a.line, b.line)]

    return find


def _successive(text: Text) -> list[tuple[Collective, Collective]]:
    """A collective, and the next to start, while the first is under way."""
    all_ = text.collectives()
    return [(a, b) for a, b in zip(all_, all_[1:]) if a.wait > b.line]


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
    return list(zip(found, found[1:]))


@breaks("order", _pairs("all_gather"))
def two_starts_exchanged(text: Text, place: tuple[Collective, Collective]) -> None:
    first, second = place
    for i in text.dels(first.sent) + text.dels(second.sent):
        text.lines[i] = ""
    alias = text.find(rf"^\s*{first.brought} = {first.result}$")[0]
    moved = [first.line, alias, *text.find(rf"assert_\w+\({first.brought},"), *text.dels(first.result)]
    lines = [text.lines[i].strip() for i in sorted(moved)]
    for i in moved:
        text.lines[i] = ""
    text.insert(second.line + 1, *lines)


@breaks("order", _pairs("all_gather"))
def two_shards_exchanged(text: Text, place: tuple[Collective, Collective]) -> None:
    for each in place:
        for i in text.dels(each.sent):
            text.lines[i] = ""
    text.exchange(place[0].line, place[1].line, r"default\((\w+),")


@breaks("order", lambda text: text.collectives())
def a_doubled_start(text: Text, each: Collective) -> None:
    text.insert(each.line, text.lines[each.line].strip().replace(f"{each.result} =", "buf900 ="))


@breaks("order", _successive)
def a_start_behind_the_next(text: Text, place: tuple[Collective, Collective]) -> None:
    first, second = place
    alias = text.find(rf"^\s*{first.brought} = {first.result}$")[0]
    moved = [first.line, alias, *text.find(rf"assert_\w+\({first.brought},"), *text.dels(first.result)]
    moved += [i for i in text.dels(first.sent) if i < second.line]
    lines = [text.lines[i].strip() for i in sorted(moved)]
    for i in moved:
        text.lines[i] = ""
    text.insert(second.line + 1, *lines)


@breaks("order", lambda text: text.collectives("all_gather"))
def another_collective_in_its_place(text: Text, each: Collective) -> None:
    text.lines[each.line] = text.lines[each.line].replace("all_gather_pairwise", "all_to_all_pairwise")


@breaks("order", lambda text: text.collectives()[-1:])
def a_start_that_is_gone_with_its_wait(text: Text, each: Collective) -> None:
    text.lines[each.line] = f"        {each.result} = empty_strided_cpu((4, ), (1, ), torch.float32)"
    text.lines[each.wait] = ""


@breaks("order", _reductions)
def a_reduction_of_a_part_of_the_pack(text: Text, each: Collective) -> None:
    part = f"reinterpret_tensor({each.sent}, (8, ), (1, ), 0)"
    text.lines[each.line] = text.lines[each.line].replace(f"default({each.sent},", f"default({part},")


@breaks("order", _sums)
def two_sums_exchanged(text: Text, place: tuple[str, str]) -> None:
    line = re.sub(rf"\b{place[0]}\b", "TEMPORARY", text.lines[text.end])
    line = re.sub(rf"\b{place[1]}\b", place[0], line)
    text.lines[text.end] = line.replace("TEMPORARY", place[1])


@breaks("order", lambda text: [(i, s) for i in text.find(r"zerofx\.refresh") for s in text.find(r"_pairwise\.", i)[:1]])
def a_refresh_behind_the_next_start(text: Text, place: tuple[int, int]) -> None:
    result = re.search(r"(\w+) =", text.lines[place[0]])[1]  # type: ignore[index]
    line = text.lines[place[0]].strip()
    for i in text.find(rf"\b{result}\b", 0, place[1]):
        text.lines[i] = ""
    argument = re.search(r"default\((\w+),", line)[1]  # type: ignore[index]
    for i in text.dels(argument):
        text.lines[i] = ""
    text.insert(place[1] + 1, line)


# ---- copy -----------------------------------------------------------------------------------------------------------


def _matrices(text: Text) -> list[tuple[int, str, str]]:
    """Products that read a gathered buffer in the place of a matrix: the line, the view's text and its sizes."""
    found = []
    for name in {name for _, name in text.waits()} | {each.brought for each in text.collectives("all_gather")}:
        for i in text.calls(name):
            views = re.findall(rf"(reinterpret_tensor\({name}, \((\d+, \d+)\), \([\d, ]+\), \d+\))", text.lines[i])
            found += [(i, view, sizes) for view, sizes in views if re.search(r"extern_kernels\.(add)?mm", text.lines[i])]
    return sorted(found)


_KERNEL = """
cpp_fused_clone_900 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0)
{
    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(64L); x0+=static_cast<int64_t>(1L))
    {
        auto tmp0 = in_ptr0[static_cast<int64_t>(x0)];
        out_ptr0[static_cast<int64_t>(x0)] = tmp0;
    }
}
''')
"""


@breaks("copy", _matrices)
def a_matrix_is_cloned(text: Text, place: tuple[int, str, str]) -> None:
    i, view, _ = place
    text.insert(i, f"buf900 = torch.ops.aten.clone.default({view})")
    text.lines[i + 1] = text.lines[i + 1].replace(view, "buf900")


@breaks("copy", _matrices)
def a_matrix_is_cloned_by_its_method(text: Text, place: tuple[int, str, str]) -> None:
    i, view, _ = place
    text.insert(i, f"buf900 = {view}.clone()")
    text.lines[i + 1] = text.lines[i + 1].replace(view, "buf900")


@breaks("copy", _matrices)
def a_matrix_is_copied_to_memory_of_its_own(text: Text, place: tuple[int, str, str]) -> None:
    i, view, sizes = place
    strides = f"({sizes.split(', ')[1]}, 1)"
    text.insert(i, f"buf900 = empty_strided_cpu(({sizes}), {strides}, torch.float32)", f"buf900.copy_({view}, False)")
    text.lines[i + 2] = text.lines[i + 2].replace(view, "buf900")


@breaks("copy", _matrices)
def a_matrix_is_copied_by_a_kernel(text: Text, place: tuple[int, str, str]) -> None:
    i, view, sizes = place
    strides = f"({sizes.split(', ')[1]}, 1)"
    name = re.search(r"\((\w+),", view)[1]  # type: ignore[index]
    text.insert(i, f"buf900 = empty_strided_cpu(({sizes}), {strides}, torch.float32)", f"cpp_fused_clone_900({name}, buf900)")
    text.lines[i + 2] = text.lines[i + 2].replace(view, "buf900")
    at = next(i for i, line in enumerate(text.lines) if line.startswith("async_compile.wait("))
    text.lines[at:at] = _KERNEL.splitlines()


@breaks("copy", lambda text: [each for each, _, _ in _released(text)])
def a_gathered_buffer_is_cloned(text: Text, each: Collective) -> None:
    text.insert(each.wait + 1, f"buf900 = torch.ops.aten.clone.default({each.brought})")


@breaks("copy", lambda text: text.find(r"^\s*cpp_fused_(convolution|clone)\w*\(buf\d+, buf\d+\)"))
def a_copy_that_is_asked_for_is_made_twice(text: Text, i: int) -> None:
    out = re.search(r", (\w+)\)", text.lines[i])[1]  # type: ignore[index]
    memory = text.lines[text.find(rf"^\s*{out} = empty_strided")[0]].strip()
    text.insert(i, memory.replace(f"{out} =", "buf900 ="), text.lines[i].strip().replace(f"{out})", "buf900)"))


# ---- step -----------------------------------------------------------------------------------------------------------


def _updates(text: Text) -> list[tuple[int, str]]:
    """The updates, and the input that they write to."""
    inputs = text.lines[text.begin - 2]
    found = []
    for i in text.find(r"zerofx\.step\.default\("):
        group = re.search(r"'([\w.]+)'\)", text.lines[i])[1].replace(".", "_")  # type: ignore[index]
        home = re.search(rf"\b(?:replica|shard)_{group}\b", inputs)
        found += [(i, home[0])] if home else []
    return found


@breaks("step", _updates)
def a_reader_behind_the_update(text: Text, place: tuple[int, str]) -> None:
    i, home = place
    text.insert(i + 1, f"buf900 = torch.ops.aten.sum.default({home})")
    for line in reversed(text.dels(home)):
        text.lines[line] = ""


@breaks("step", lambda text: [place for place in _updates(text) if "replica" in place[1]])
def a_product_behind_the_update(text: Text, place: tuple[int, str]) -> None:
    i, home = place
    view = f"reinterpret_tensor({home}, (2, 2), (2, 1), 0)"
    out = "buf900 = empty_strided_cpu((2, 2), (2, 1), torch.float32)"
    text.insert(i + 1, out, f"extern_kernels.mm({view}, {view}, out=buf900)")
    for line in reversed(text.dels(home)):
        text.lines[line] = ""


@breaks("step", _updates)
def a_second_update(text: Text, place: tuple[int, str]) -> None:
    text.lines.insert(place[0], text.lines[place[0]])


@breaks("step", _updates)
def a_dropped_update(text: Text, place: tuple[int, str]) -> None:
    name = re.search(r"(\w+) =", text.lines[place[0]])[1]  # type: ignore[index]
    text.lines[place[0]] = f"        {name} = empty_strided_cpu((0, ), (1, ), torch.float32)"


@breaks("step", lambda text: list(zip(_updates(text), _updates(text)[1:])))
def two_updates_exchange_their_groups(text: Text, place: tuple[tuple[int, str], tuple[int, str]]) -> None:
    text.exchange(place[0][0], place[1][0], r"'([\w.]+)'\)")


@breaks("step", lambda text: _updates(text)[1:])
def an_update_by_something_else(text: Text, place: tuple[int, str]) -> None:
    text.lines[place[0]] = re.sub(r"default\(\w+,", "default(buf900,", text.lines[place[0]])
    text.insert(place[0], "buf900 = empty_strided_cpu((64, ), (1, ), torch.float32)")
