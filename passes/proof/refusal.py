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
        pass_name: the user's pass that made the graph so; empty where zerofx's made it.
    """

    def __init__(
        self, message: str, rule: str = "", node: str = "", group: str | None = None, pass_name: str = ""
    ) -> None:
        super().__init__(message)
        self.rule, self.node, self.group, self.pass_name = rule, node, group, pass_name

    def saved_in(self, path: str) -> VerificationError:
        """The same error, which also names the file that holds the graphs."""
        text = f"{self} The graphs were saved in {path}."
        return VerificationError(text, self.rule, self.node, self.group, self.pass_name)

    @staticmethod
    def by_pass(name: str, graph: str, error: Exception) -> VerificationError:
        """``error``, which the user's pass ``name`` brought about in the ``graph`` of that phase."""
        told = (
            str(error).partition(_OURS)[0]
            if isinstance(error, VerificationError)
            else f"{type(error).__name__}: {error}"
        )
        text = (
            f"the pass {name!r} made a {graph} graph that cannot run; without that pass it can. {told.strip()} "
            f"{_OURS} docs/own-passes.md says what a pass may do."
        )
        rule, node, group = (getattr(error, key, None) for key in ("rule", "node", "group"))
        return VerificationError(text, rule or "", node or "", group, name)


_OURS = "The graph was not run."


def refuse(rule: str, node: Node, found: str, expected: str, group: str | None = None) -> NoReturn:
    """Raise, with the place in the user's model that ``node`` serves."""
    place = place_in_model(node)
    of = f" of group {group!r}" if group else ""
    raise VerificationError(
        f"the rewritten graph breaks the rule {rule!r} at node {node.name!r}{of}{place}: {found}; expected: "
        f"{expected}. {_OURS} This is a bug of zerofx, not of the model: please report it. "
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
