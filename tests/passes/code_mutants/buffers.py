"""Gathered buffers over time, copies of weights, updates: the rules "discard", "copy" and "step"."""

from __future__ import annotations

import re

from tests.passes.code_mutants import Collective, Text, breaks, released

# ---- discard --------------------------------------------------------------------------------------------------------


def _released_before_a_start(text: Text) -> list[tuple[Collective, int, int]]:
    starts = [each.line for each in text.collectives()]
    return [place for place in released(text) if any(line > place[1] for line in starts)]


def _later_products(text: Text) -> list[tuple[int, str, str]]:
    """A product behind the end of a gathered buffer, that reads another; and what is gone."""
    found = []
    for each, end, _ in released(text):
        for other, later, _ in released(text):
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


@breaks("discard", released)
def a_release_before_the_last_reader(text: Text, place: tuple[Collective, int, int]) -> None:
    text.move(place[1], place[2])


@breaks("discard", released)
def a_second_release(text: Text, place: tuple[Collective, int, int]) -> None:
    text.lines.insert(place[1], text.lines[place[1]])


@breaks("discard", _later_products)
def a_kernel_reads_what_was_let_go(text: Text, place: tuple[int, str, str]) -> None:
    text.rename(*place)


@breaks("discard", _overwritable)
def a_product_is_written_over_weights(text: Text, place: tuple[int, str]) -> None:
    text.lines[place[0]] = re.sub(r"out=\w+\)", f"out={place[1]})", text.lines[place[0]])


@breaks("discard", released)
def weights_are_used_again_before_their_last_reader(text: Text, place: tuple[Collective, int, int]) -> None:
    text.insert(place[2], f"buf900 = {place[0].brought}", "torch.ops.aten.zero_.default(buf900)")


@breaks("discard", released)
def weights_are_written_through_a_view(text: Text, place: tuple[Collective, int, int]) -> None:
    text.insert(place[2], f"torch.ops.aten.zero_.default(reinterpret_tensor({place[0].brought}, (4, ), (1, ), 0))")


# ---- copy -----------------------------------------------------------------------------------------------------------


def _matrices(text: Text) -> list[tuple[int, str, str]]:
    """Products that read a gathered buffer in the place of a matrix: the line, the view's text and its sizes."""
    found = []
    for name in {name for _, name in text.waits()} | {each.brought for each in text.collectives("all_gather")}:
        for i in text.calls(name):
            views = re.findall(rf"(reinterpret_tensor\({name}, \((\d+, \d+)\), \([\d, ]+\), \d+\))", text.lines[i])
            found += [
                (i, view, sizes) for view, sizes in views if re.search(r"extern_kernels\.(add)?mm", text.lines[i])
            ]
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
    text.insert(
        i, f"buf900 = empty_strided_cpu(({sizes}), {strides}, torch.float32)", f"cpp_fused_clone_900({name}, buf900)"
    )
    text.lines[i + 2] = text.lines[i + 2].replace(view, "buf900")
    at = next(i for i, line in enumerate(text.lines) if line.startswith("async_compile.wait("))
    text.lines[at:at] = _KERNEL.splitlines()


@breaks("copy", lambda text: [each for each, _, _ in released(text)])
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
    text.lines[place[0]] = f"{text.margin}{name} = empty_strided_cpu((0, ), (1, ), torch.float32)"


@breaks("step", lambda text: list(zip(_updates(text), _updates(text)[1:])))
def two_updates_exchange_their_groups(text: Text, place: tuple[tuple[int, str], tuple[int, str]]) -> None:
    text.exchange(place[0][0], place[1][0], r"'([\w.]+)'\)")


@breaks("step", lambda text: _updates(text)[1:])
def an_update_by_something_else(text: Text, place: tuple[int, str]) -> None:
    text.lines[place[0]] = re.sub(r"default\(\w+,", "default(buf900,", text.lines[place[0]])
    text.insert(place[0], "buf900 = empty_strided_cpu((64, ), (1, ), torch.float32)")
