"""Copies of a sharded module: sharded alike, with groups and slices of their own. Nothing is sent, nothing is gathered.

::

    teacher = copy.deepcopy(student)                torch.optim.swa_utils.AveragedModel(student)

    student ══▶ parameters ══▶ groups ══▶ shards                 family 1       compiled
                                             │ copied
    teacher ══▶ parameters ══▶ groups ══▶ shards                 family 2       compiled when it is called

``copy.deepcopy`` goes through a module as it does through any object. Before it does, the module's groups are copied,
and the memo says which parameter of these stands for which (`copied`). So ties, lists of parameters and an optimizer
that is copied together with its module are right. Every rank copies alike, as it shards alike: a family has a number.

What comes along: weights as they are, which of them are frozen, buffers, hooks of the module, options. What does not:
gradients, those that `zerofx.no_sync` kept too, and what ``register_hook`` and its like have put on parameters.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from zerofx._torch import around_copies
from zerofx.compiler.auto import Choice
from zerofx.compiler.options import Options
from zerofx.compiler.shadow import take_turns
from zerofx.model.offload import Offload
from zerofx.runtime.eager.averages import is_ignored, note_ignored
from zerofx.runtime.eager.leaf import make_leaves
from zerofx.runtime.eager.ondemand import average_by_hook, reduce_by_hook
from zerofx.runtime.eager.whole import is_whole
from zerofx.runtime.state.group import Family, ShardGroup, groups_of
from zerofx.runtime.state.parameter import copy_parameter
from zerofx.runtime.state.plain import copy_own


@dataclass(frozen=True)
class Recipe:
    """How a module was sharded, and how a copy of it becomes the same.

    Attributes:
        options: what the user asked for.
        root: the module that was sharded.
        compiled: compiles a copy; None: it runs as it reads.
        choice: why it has these options; None: the user gave them all.
    """

    options: Options
    root: weakref.ref[nn.Module]
    compiled: Callable[[nn.Module], None] | None = None
    choice: Choice | None = None


def copied(module: nn.Module, memo: dict[int, Any], by_parts: Callable[[], nn.Module]) -> nn.Module:
    """What ``copy.deepcopy`` makes of ``module``, of which parts may be sharded; ``by_parts`` does it part by part.

    Raises:
        RuntimeError: what this rank holds of it cannot be copied. Nothing was made then.
    """
    groups = [group for group in groups_of(module) if id(group) not in memo]
    if not groups:
        return by_parts()  # nothing is sharded; or it is a part of what is being copied
    families = list(dict.fromkeys(group.family for group in groups))
    _check(module, families)
    for family in families:
        if id(family) not in memo:
            memo[id(family)] = _alike(family, groups)
    for group in groups:
        memo[id(group)] = made = group.alike(memo[id(group.family)])
        for slot in group.layout.slots:
            if (p := group.members.live(slot)) is not None:
                memo[id(p)] = copy_parameter(p, made)
                (reduce_by_hook if made.family.stage else average_by_hook)(memo[id(p)])
    new = by_parts()
    for group in groups:
        for slot in group.layout.slots:
            if (p := group.members.live(slot)) is not None and p._own:
                memo[id(p)]._was, memo[id(p)]._own = p._was, p._own
                copy_own(p, memo[id(p)], memo)
    for p in module.parameters():
        if is_ignored(p):
            note_ignored(memo[id(p)])
    for family in families:
        if family.averages is not None:
            memo[id(family)].averages = family.averages.alike(memo[id(family)], memo)
        _finish(family, module, new, memo)
    return new


def _check(module: nn.Module, families: list[Family]) -> None:
    what = f"copy.deepcopy of a {type(module).__name__}"
    whole = next((name for name, p in module.named_parameters() if is_whole(p)), None)
    if whole is not None:
        raise RuntimeError(
            f"{what} of which {whole!r} is whole for now, and other weights are sharded. Copy it outside of "
            "zerofx.unsharded, and the copy is sharded; or inside of `with zerofx.unsharded(module):` of this module."
        )
    for family in families:
        offload = Offload.of(family.offload)
        if family.one_copy or (offload is not None and offload.folder is not None):
            option = "one_copy=True" if family.one_copy else f"offload={str(offload.folder)!r}"  # type: ignore[union-attr]
            raise RuntimeError(
                f"{what} that was sharded with {option}: a copy would need memory, or files, that all ranks make "
                "together. Copy it inside of `with zerofx.unsharded(module, writeback=False):`, where it is an "
                "ordinary module, and give the copy to zerofx.compile with options of its own."
            )


def _alike(family: Family, groups: list[ShardGroup]) -> Family:
    """The family of a copy, with a number of its own."""
    made = family.alike()
    sharing = next(group.sharing for group in groups if group.family is family)
    if (watch := sharing.watch()) is not None:
        watch.families += 1
        made.number = watch.families
    if family.turns is not None:
        take_turns(made, sharing.weights.name)
    return made


def _finish(family: Family, module: nn.Module, new: nn.Module, memo: dict[int, Any]) -> None:
    """What a conversion does last (`zerofx.compiler.shard`), as far as ``new``, a copy of ``module``, lacks it."""
    made: Family = memo[id(family)]
    made.casts = copy.deepcopy(family.casts, memo)
    recipe: Recipe = family.recipe
    root, parts = recipe.root(), set(module.modules())
    within = {} if root is None else {m: name for name, m in root.named_modules()}
    if root not in parts:  # a part of it: what is copied is the whole from now on
        root = module if module in within else None
    if root is None:
        return
    keep = recipe.options.memory_budget == math.inf
    new_root: nn.Module = new if root is module else memo[id(root)]
    leaves = [name for name, m in root.named_modules() if hasattr(type(m), "_zerofx_groups")]
    make_leaves(new_root, leaves, keep)
    made.recipe = replace(recipe, root=weakref.ref(new_root))
    if recipe.compiled is not None:
        recipe.compiled(new_root)


around_copies(copied)
