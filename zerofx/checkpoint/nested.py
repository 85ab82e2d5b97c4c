"""Values that are made of others: what a module calls its extra state, what an optimizer keeps in lists.

torch.distributed.checkpoint stores leaves, each under its place in the state, joined by dots::

    {"model": {"0._extra_state": {"seen": 3, 7: []}}}      model.0._extra_state.seen    3
                                                            model.0._extra_state.7       []

Names of keys that are no strings, tuples and what is empty are lost that way. So `zerofx.save` notes the *form* beside
it: the same state with each leaf's place for the leaf. `rebuild` makes the state again. Of other folders, and old ones,
the form is guessed from the places (`of_paths`).

Leaves are read with ``weights_only=True``; besides what PyTorch allows, these may be byte streams, frozen sets and
arrays of numpy's.
"""

from __future__ import annotations

import functools
import io
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from zerofx.checkpoint.ranks import CheckpointError
from zerofx.runtime.state.parameter import ShardedTensor

Form = tuple[str, Any]
"""``("leaf" or "slice", its key)``, or a container's kind and its forms, of a mapping with keys."""


def listed(value: Any) -> Any:
    """``value`` with lists for those tuples that hold tensors, which torch.distributed.checkpoint would pickle."""
    if isinstance(value, Mapping):
        return {key: listed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [listed(item) for item in value]
    if type(value) is tuple and any(isinstance(leaf, torch.Tensor) for _, leaf in named_leaves(value)):
        return [listed(item) for item in value]
    return value


def form_of(value: Any, places: Mapping[str, tuple[Any, ...]], at: tuple[Any, ...] = ()) -> Form:
    """The form of ``value``; ``places`` are those of all leaves, by key."""
    key = ".".join(map(str, at))
    if places.get(key) == at:
        return ("slice" if isinstance(value, ShardedTensor) else "leaf", key)
    if isinstance(value, Mapping):
        kind = "OrderedDict" if isinstance(value, OrderedDict) else "dict"
        return kind, [(name, form_of(item, places, (*at, str(name)))) for name, item in value.items()]
    kind = "tuple" if isinstance(value, tuple) else "list"
    return kind, [form_of(item, places, (*at, i)) for i, item in enumerate(value)]


def of_paths(places: Mapping[str, tuple[Any, ...]]) -> Form:
    """The form of a state of mappings and lists whose leaves are at ``places``."""
    tree: dict[Any, Any] = {}
    for key, path in places.items():
        node = tree
        for step in path[:-1]:
            node = node.setdefault(step, {})
        node[path[-1]] = ("leaf", key)
    return _form_of_tree(tree)


def _form_of_tree(node: Any) -> Form:
    if not isinstance(node, dict):
        return node
    if node and all(type(step) is int for step in node):
        return "list", [_form_of_tree(node[i]) for i in sorted(node)]
    return "dict", [(name, _form_of_tree(item)) for name, item in node.items()]


def rebuild(form: Form, leaf: Callable[[str, bool], Any]) -> Any:
    """The state of ``form``; ``leaf`` is asked for each leaf by its key, and told whether it was sharded."""
    kind, parts = form
    if kind in ("leaf", "slice"):
        return leaf(parts, kind == "slice")
    if kind in ("dict", "OrderedDict"):
        named = {name: rebuild(part, leaf) for name, part in parts}
        return named if kind == "dict" else OrderedDict(named)
    items = [rebuild(part, leaf) for part in parts]
    return tuple(items) if kind == "tuple" else items


def mapped(value: Any, function: Callable[[str, Any], Any], name: str = "") -> Any:
    """``value`` with ``function(name, leaf)`` for each leaf; names are as ``past[0]['last']``.

    A tuple of a class of its own, ``torch.Size`` for one, is a leaf.
    """
    if isinstance(value, Mapping):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind((key, mapped(item, function, f"{name}[{key!r}]")) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(mapped(item, function, f"{name}[{i}]") for i, item in enumerate(value))
    return function(name, value)


def named_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What is in ``value``, however deep, by the names that `mapped` has."""
    found: list[tuple[str, Any]] = []
    mapped(value, lambda name, leaf: found.append((name, leaf)), name)
    yield from found


def pack(state: Any) -> bytes:
    """``state`` as `unpack` reads it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpack(data: bytes | io.BytesIO) -> Any:
    """What `pack` made bytes of; no code of theirs runs."""
    with readable():
        return torch.load(io.BytesIO(data) if isinstance(data, bytes) else data, map_location="cpu", weights_only=True)


def readable() -> Any:
    """Inside, ``torch.load(weights_only=True)`` reads what a checkpoint may hold."""
    return torch.serialization.safe_globals([io.BytesIO, frozenset, *(_of_numpy() if "numpy" in sys.modules else ())])


@functools.cache
def _of_numpy() -> list[Any]:
    """What pickles of arrays and numbers of numpy's name, for dtypes without objects."""
    import numpy

    dtypes = {type(numpy.dtype(code)) for code in numpy.typecodes["AllInteger"] + numpy.typecodes["Float"] + "?FDUS"}
    makers = [numpy.zeros(1).__reduce__()[0], numpy.float64(1).__reduce__()[0]]
    return [numpy.ndarray, numpy.dtype, *makers, *dtypes]


def check_readable(state: Any, who: str) -> None:
    """Refuse what could be written, and not be read again.

    Raises:
        CheckpointError: ``who`` has it.
    """
    try:
        unpack(pack(state))
    except Exception as e:
        raise CheckpointError(
            f"{who} holds what cannot be loaded without running code of the file's choice: pass numbers, strings, "
            f"bytes, tensors and containers of them, or trust its class by torch.serialization.add_safe_globals. ({e})"
        ) from e
