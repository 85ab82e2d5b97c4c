"""What lives elsewhere comes and leaves: the rules "reload", "offload" and "activation"."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from tests.passes.code_mutants import Break, Places, Text, breaks

Where = Callable[[Text, "Carry"], bool]
RULES = {
    "reload": "reload",
    "offload": "offload",
    "offload_activation": "activation",
    "reload_activation": "activation",
}


@dataclass(frozen=True)
class Carry:
    """A start and its wait: their lines, the ticket, the tensor that both are given, what the wait returns."""

    line: int
    wait: int
    ticket: str
    given: str
    result: str


def carries(text: Text, operator: str) -> list[Carry]:
    found = []
    for i in text.find(rf"= torch\.ops\.zerofx\.{operator}\."):
        result, given = re.search(r"(\w+) = [\w.]+\((\w+),", text.lines[i]).groups()  # type: ignore[union-attr]
        ticket = _alias(text, result, i)
        wait = text.find(rf"= torch\.ops\.zerofx\.wait_{operator}\.default\({ticket},", i)[0]
        back = re.search(r"(\w+) =", text.lines[wait])[1]  # type: ignore[index]
        found.append(Carry(i, wait, ticket, given, _alias(text, back, wait)))
    return found


def _alias(text: Text, name: str, line: int) -> str:
    """What Inductor calls it from there on, where it gives it another name (not since 2.15)."""
    found = text.find(rf"^\s*\w+ = {name}$", line)[:1]
    return re.search(r"(\w+) =", text.lines[found[0]])[1] if found else name  # type: ignore[index]


def of_each(*operators: str, where: Where = lambda text, each: True) -> Callable[[Break], Break]:
    """What the decorated function does to one `Carry`, for each of the operators."""

    def add(break_: Break) -> Break:
        for operator in operators:
            _named(break_, operator, _places(operator, where))
        return break_

    return add


def of_pairs(*operators: str) -> Callable[[Break], Break]:
    """What the decorated function does to one `Carry` and the next."""

    def add(break_: Break) -> Break:
        for operator in operators:
            _named(break_, operator, lambda text, operator=operator: list(pairwise(carries(text, operator))))
        return break_

    return add


def _places(operator: str, where: Where) -> Places:
    return lambda text: [each for each in carries(text, operator) if where(text, each)]


def _named(break_: Break, operator: str, places: Places) -> None:
    def break_one(text: Text, place: object) -> None:
        break_(text, place)

    break_one.__name__ = f"{break_.__name__}_{operator}"
    breaks(RULES[operator], places)(break_one)


ALL = tuple(RULES)


@of_each("reload", "reload_activation")
def a_wait_left_out(text: Text, each: Carry) -> None:
    text.lines[each.wait] = re.sub(r"torch\.ops\..*", each.ticket, text.lines[each.wait])


@of_each(*ALL)
def a_wait_that_runs_twice(text: Text, each: Carry) -> None:
    text.lines.insert(each.wait, text.lines[each.wait])


@of_each(*ALL)
def a_start_that_runs_twice(text: Text, each: Carry) -> None:
    text.lines.insert(each.line, text.lines[each.line])


@of_each("offload", "offload_activation")
def a_wait_that_is_given_another_tensor(text: Text, each: Carry) -> None:
    text.lines[each.wait] = re.sub(r"(default\(\w+, )\w+", rf"\1{each.ticket}", text.lines[each.wait])


@of_pairs("reload", "reload_activation")
def two_starts_of_each_others_tensors(text: Text, pair: tuple[Carry, Carry]) -> None:
    text.exchange(pair[0].line, pair[1].line, r"default\((\w+),")


@of_pairs(*ALL)
def two_starts_of_each_others_places(text: Text, pair: tuple[Carry, Carry]) -> None:
    text.exchange(pair[0].line, pair[1].line, r"default\(\w+, ([^=]*?)(?:, room=\d+)?\)")


@of_pairs(*ALL)
def two_waits_for_each_others_tickets(text: Text, pair: tuple[Carry, Carry]) -> None:
    """Both were started by the first of the waits."""
    if pair[1].line < pair[0].wait:
        text.exchange(pair[0].wait, pair[1].wait, r"default\((\w+),")
    else:
        text.lines[pair[1].wait] = re.sub(r"default\(\w+,", f"default({pair[1].given},", text.lines[pair[1].wait])


@of_each("offload_activation", "reload_activation")
def dimensions_in_another_order(text: Text, each: Carry) -> None:
    text.lines[each.line] = re.sub(r"\[[\d, ]*\]", "[7]", text.lines[each.line])


@of_each("reload", "reload_activation")
def a_product_that_reads_what_is_on_its_way(text: Text, each: Carry) -> None:
    text.insert(each.wait, f"extern_kernels.mm({each.ticket}, {each.ticket}, out=empty_strided_cpu((1, ), (1, )))")


@of_each("reload", "reload_activation")
def a_product_that_reads_what_stands_for_it(text: Text, each: Carry) -> None:
    text.insert(each.wait, f"extern_kernels.mm({each.given}, {each.given}, out=empty_strided_cpu((1, ), (1, )))")


@of_each("offload", "offload_activation")
def a_product_written_to_what_is_leaving(text: Text, each: Carry) -> None:
    text.insert(each.wait, f"extern_kernels.mm({each.given}, {each.given}, out={each.given})")


@of_each("offload_activation")
def a_product_that_reads_a_handle(text: Text, each: Carry) -> None:
    text.insert(text.end, f"extern_kernels.mm({each.result}, {each.result}, out=empty_strided_cpu((1, ), (1, )))")


@of_each("offload", "offload_activation", where=lambda text, each: each.result in text.lines[text.end])
def an_output_that_says_nothing(text: Text, each: Carry) -> None:
    text.rename(text.end, each.result, "None")


@of_pairs("offload", "offload_activation")
def two_outputs_exchanged(text: Text, pair: tuple[Carry, Carry]) -> None:
    one, other = pair[0].result, pair[1].result
    both = {one: other, other: one}
    text.lines[text.end] = re.sub(rf"\b({one}|{other})\b", lambda m: both[m[1]], text.lines[text.end])
