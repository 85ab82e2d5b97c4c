"""The error by which `verify` refuses a graph."""

from __future__ import annotations

from typing import NoReturn

from torch.fx import Node


class VerificationError(RuntimeError):
    """A rewritten graph breaks a rule of `zerofx.passes.verify`.

    Attributes:
        rule: which.
        node: the name of the node at which it shows.
        group: of the parameters concerned; None where it is not known.
    """

    def __init__(self, message: str, rule: str = "", node: str = "", group: str | None = None) -> None:
        super().__init__(message)
        self.rule, self.node, self.group = rule, node, group

    def saved_in(self, path: str) -> VerificationError:
        """The same error, which also names the file that holds the graphs."""
        return VerificationError(f"{self} The graphs were saved in {path}.", self.rule, self.node, self.group)


def refuse(rule: str, node: Node, found: str, expected: str, group: str | None = None) -> NoReturn:
    """Raise, with the place in the user's model that ``node`` serves."""
    place = place_in_model(node)
    of = f" of group {group!r}" if group else ""
    raise VerificationError(
        f"the rewritten graph breaks the rule {rule!r} at node {node.name!r}{of}{place}: {found}; expected: "
        f"{expected}. The graph was not run. This is a bug of zerofx, not of the model: please report it. "
        "docs/debugging.md says what to send, and what to try until it is mended.",
        rule,
        node.name,
        group,
    )


def place_in_model(node: Node) -> str:
    """The line of the user's model that ``node`` serves, for a message; empty where it is not known."""
    trace = (node.meta.get("stack_trace") or "").strip().splitlines()
    file = max((i for i, line in enumerate(trace) if line.strip().startswith("File ")), default=None)
    return "" if file is None else ", for " + " ".join(line.strip() for line in trace[file : file + 2])
