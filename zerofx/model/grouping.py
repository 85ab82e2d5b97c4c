"""Which parameters travel together.

Automatic grouping reads module names alone, so it serves a model nobody prepared:

* a *block* is what stands at a number in a container: ``h.0``, ``encoder.layer.11``. The outermost number counts;
  ``layers.3.experts.5.w`` belongs to block ``layers.3``;
* between blocks, what is left forms a group of its own, in registration order: embeddings before, head after;
* within those, one group per dtype, policy of mixed precision and ``requires_grad``;
* neighbours of the same kind that are smaller than ``min_bytes`` together are merged, and what is larger than
  ``max_bytes`` is split between parameters. A parameter as large as that is alone in its group: its gradient is
  reduced from where it is, for there is nothing to pack it with;
* what is in a leaf module (`zerofx.runtime.eager.leaf`) is neither: it has one group for itself per dtype, policy and
  ``requires_grad``.

``groups=`` overrides what a block is: module classes, or a function ``(name, module) -> bool``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zerofx._torch import held
from zerofx.model.layout import GroupLayout, make_layout
from zerofx.model.policies import Policies, Policy
from zerofx.model.precision import MixedPrecision, keeps_dtype

BlockRule = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Grouping:
    """How parameters are grouped.

    Attributes:
        blocks: None for automatic; module classes; or ``(name, module) -> bool`` that is True for a block.
        min_bytes: neighbouring groups that together stay below this are merged: a collective has a cost of its own.
        max_bytes: a larger group is split between parameters: it would all have to be there at once, and nothing of it
            travels before all of it is computed; a parameter of as much or more has a group of its own. None: 8 MiB on
            gloo, where links are slow and a message costs little beside its bytes; 256 MiB elsewhere.
    """

    blocks: Sequence[type[nn.Module]] | BlockRule | None = None
    min_bytes: int = 256 * 1024
    max_bytes: int | None = None

    @staticmethod
    def of(groups: Grouping | Iterable[type[nn.Module]] | BlockRule | None) -> Grouping:
        """What the ``groups=`` option means."""
        if isinstance(groups, Grouping):
            return groups
        if groups is None or (callable(groups) and not isinstance(groups, (type, nn.Module))):
            return Grouping(groups)
        classes: Any = tuple(groups) if isinstance(groups, Iterable) and not isinstance(groups, type) else (groups,)
        if not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
            raise TypeError(
                f"groups={groups!r}: expected nn.Module classes, a function (name, module) -> bool, or a Grouping."
            )
        return Grouping(classes)


@dataclass
class _Draft:
    block: str
    dtype: torch.dtype
    requires_grad: bool
    leaf: str | None
    dtypes: tuple[torch.dtype | None, torch.dtype | None]
    members: list[tuple[str, nn.Parameter]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(held(p).nbytes for _, p in self.members)

    @property
    def kind(self) -> tuple[torch.dtype, bool, str | None, tuple[torch.dtype | None, torch.dtype | None]]:
        return self.dtype, self.requires_grad, self.leaf, self.dtypes


def plan_groups(
    module: nn.Module,
    world_size: int,
    grouping: Grouping,
    leaves: Iterable[str] = (),
    backend: str = "",
    code_block: int = 1,
    mixed_precision: Policy | None = None,
    ignored: Container[nn.Parameter] = (),
) -> list[tuple[GroupLayout, list[nn.Parameter]]]:
    """The groups of ``module``: each a layout, and its parameters in the order of the layout's slots.

    A parameter that occurs under several names is taken once, under the first. ``leaves`` are names of leaf modules,
    ``backend`` is what collectives of the parameters run on. ``code_block`` is the ``block`` of `make_layout`.
    ``mixed_precision`` is what a user gave; parameters that are ``ignored`` are in no group.
    """
    drafts: list[_Draft] = []
    block_of, leaves, policies = _block_rule(module, grouping), tuple(leaves), Policies(module, mixed_precision)
    runs = 0
    last_block: str | None = None
    for name, parameter in module.named_parameters():
        if parameter in ignored:
            continue
        leaf = next((leaf for leaf in leaves if not leaf or name.startswith(f"{leaf}.")), None)
        block = block_of(name) if leaf is None else leaf
        if block is None:
            runs += last_block is not None or not drafts
            last_block = None
            key = f"\0{runs}"  # a run of parameters between blocks
        else:
            key = last_block = block
        policy = MixedPrecision() if keeps_dtype(parameter) else policies.of(name)
        kind = (parameter.dtype, parameter.requires_grad, leaf, (policy.param_dtype, policy.reduce_dtype))
        draft = next((d for d in reversed(drafts) if d.block == key and d.kind == kind), None)
        if draft is None:
            drafts.append(draft := _Draft(key, *kind))
        draft.members.append((name, parameter))
    most = grouping.max_bytes if grouping.max_bytes is not None else _MAX_BYTES.get(backend, 256 << 20)
    merged = _merge(drafts, grouping.min_bytes)
    drafts = [part for draft in merged for part in _split(draft, most, grouping.min_bytes)]

    planned: list[tuple[GroupLayout, list[nn.Parameter]]] = []
    taken: set[str] = set()
    for draft in drafts:
        name = _unique(_group_name(draft), taken)
        shapes = [(n, held(p).shape) for n, p in draft.members]
        precision = MixedPrecision(*draft.dtypes)
        layout = make_layout(name, shapes, draft.dtype, world_size, draft.requires_grad, code_block, precision)
        planned.append((layout, [p for _, p in draft.members]))
    return planned


def _block_rule(module: nn.Module, grouping: Grouping) -> Callable[[str], str | None]:
    """A function from a parameter's name to the name of its block, or None."""
    if grouping.blocks is None:
        return _numbered_block
    rule = grouping.blocks
    if not callable(rule):
        classes = tuple(rule)
        chosen = {name for name, m in module.named_modules() if isinstance(m, classes)}
    else:
        chosen = {name for name, m in module.named_modules() if rule(name, m)}
    if not chosen:
        raise ValueError(f"groups={grouping.blocks!r}: no module of this {type(module).__name__} matches.")

    def innermost(name: str) -> str | None:
        while "." in name:
            name = name.rpartition(".")[0]
            if name in chosen:
                return name
        return "" if "" in chosen else None

    return innermost


def _numbered_block(name: str) -> str | None:
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return None


def _merge(drafts: list[_Draft], min_bytes: int) -> list[_Draft]:
    """Merge neighbours of one kind while the sum stays below ``min_bytes``."""
    merged: list[_Draft] = []
    for draft in drafts:
        near = next((d for d in reversed(merged) if d.kind == draft.kind), None)
        if near is not None and draft.leaf is None and near.nbytes + draft.nbytes < min_bytes:
            near.members += draft.members
        else:
            merged.append(_Draft(draft.block, *draft.kind, list(draft.members)))
    return merged


_MAX_BYTES = {"gloo": 8 << 20}


def _split(draft: _Draft, max_bytes: int, min_bytes: int) -> list[_Draft]:
    """Cut a draft between parameters into parts of at most ``max_bytes``; a parameter of as much or more is alone.

    Up to ``min_bytes`` more stay with a part, and less than that is no part: no bias travels alone, so those on both
    sides of a large parameter may travel together. A leaf module is not cut, for all of it is there at once anyway.
    """
    if draft.leaf is not None:
        return [draft]
    large: list[list[int]] = []  # of indices of members
    small: list[list[int]] = []
    total, cut = 0, True  # of what is being filled; whether a large one stands between it and the next
    sizes = [held(p).nbytes for _, p in draft.members]
    for i, nbytes in enumerate(sizes):
        if nbytes >= max_bytes:
            large.append([i])
            cut = True
            continue
        if not small or total + nbytes > max_bytes + min_bytes or (cut and total >= min_bytes):
            small.append([])
            total = 0
        small[-1].append(i)
        total, cut = total + nbytes, False
    if len(small) > 1 and total < min_bytes:
        tail = small.pop()
        small[-1] += tail
    parts = sorted(large + small)
    return [_Draft(draft.block, *draft.kind, [draft.members[i] for i in part]) for part in parts]


def _group_name(draft: _Draft) -> str:
    """The deepest module that holds all members; for members from all over, the first one's."""
    names = [name.rpartition(".")[0].split(".") for name, _ in draft.members]
    common = []
    for parts in zip(*names, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common) or ".".join(names[0]) or draft.members[0][0]


def _unique(name: str, taken: set[str]) -> str:
    """``name``, or ``name#2``, ``name#3`` … where it is taken; recorded in ``taken``."""
    candidate, i = name, 1
    while candidate in taken:
        i += 1
        candidate = f"{name}#{i}"
    taken.add(candidate)
    return candidate
