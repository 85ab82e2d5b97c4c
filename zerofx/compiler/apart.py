"""Parameters that are DTensors on dimensions of a mesh that are not ours: this rank's part of each is what is sharded.

::

    before    up.weight    DTensor of (64, 32), rows divided over "tp"             parallelize_module made it
    at rest   up.weight    ShardedParameter: of this rank's (32, 32), 1/M over "dp"
    in graphs              the (32, 32), gathered over "dp" ──▶ DTensor of (64, 32)     `zerofx._torch.as_dtensor`

Dynamo traces that last step as it does any of the model's. Then AOTAutograd takes the DTensor apart: what the passes
see is this rank's part, operations on plain tensors, and collectives of "tp", which they leave where they are.

Each rank counts its part as often as all ranks together have it: norms and checkpoints need to know who has what
(`Sharing.foreign`, `ShardGroup.dtensors`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofx._torch import DTensorLayout, held, is_dtensor, post_accumulate_hooks, put_tensor
from zerofx.runtime.optim.hooks import note_replaced
from zerofx.runtime.ranks.sharing import Sharing


class Apart:
    """The DTensor parameters of a module, and the plain ones of this rank's parts that take their places.

    Attributes:
        layouts: of each plain parameter that stands for a DTensor.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: dict[Any, list[tuple[nn.Module, str]]] = {}
        named = module.named_parameters() if isinstance(module, nn.Module) else ()
        self._names: dict[Any, str] = {p: name for name, p in named if is_dtensor(p)}
        for m in module.modules() if self._names else ():
            for name, p in m.named_parameters(recurse=False, remove_duplicate=False):
                if p in self._names:
                    self._places.setdefault(p, []).append((m, name))
        self._module = module
        self._dims: list[tuple[int, ...]] = []
        self._plain: dict[nn.Parameter, nn.Parameter] = {}
        self.layouts: dict[nn.Parameter, DTensorLayout] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    def leave(self, ignored: Iterable[nn.Parameter]) -> None:
        """Those of ``ignored`` that are DTensors stay where they are."""
        for p in ignored:
            self._names.pop(p, None)
            self._places.pop(p, None)

    def take(self, sharing: Sharing, *, pretended: bool = False) -> None:
        """Put a plain parameter in the place of each DTensor, and tell ``sharing`` which other ranks there are.

        ``pretended``: in a dry run, whose own ranks are not there.

        Raises:
            ValueError: a parameter that cannot be taken apart, by name. Nothing has changed then.
        """
        if not self._names:
            return
        layouts: dict[Any, DTensorLayout] = {p: DTensorLayout(p) for p in self._names}
        for p, name in self._names.items():
            _check(name, p, layouts[p], None if pretended else sharing)
        meet = sharing.note_foreign if pretended else sharing.connect_foreign
        meet([group for layout in layouts.values() for group in layout.groups(sharded=False)])
        self._dims = list(dict.fromkeys(_ranks(g) for layout in layouts.values() for g in layout.groups(sharded=False)))
        for p, layout in layouts.items():
            plain = nn.Parameter(held(p.detach()).contiguous(), p.requires_grad)
            plain.__dict__.update({key: value for key, value in p.__dict__.items() if key not in _DTENSORS_OWN})
            self.layouts[plain], self._plain[p] = layout, plain
            for module, name in self._places[p]:
                put_tensor(module, name, plain)

    def undo(self) -> None:
        """Everything is as it was."""
        for p in self._plain:
            for module, name in self._places[p]:
                put_tensor(module, name, p)
        self._plain.clear()

    def settle(self) -> None:
        """There is no way back: the DTensors may go. An optimizer that has one of them is told at its first step."""
        for p in self._plain:
            note_replaced(p, self._names[p])
        for kept in (self._plain, self._places, self._names):
            kept.clear()

    def facts(self) -> list[tuple[str, str]]:
        """What must be the same on all ranks that share a part."""
        return [(f"parameter {name!r}", repr((p.shape, p.placements))) for p, name in self._names.items()]

    def copies(self) -> dict[str, tuple[Any, Any]]:
        """Of each parameter of the module which part of it this rank has, and sums by which copies are compared."""
        found: dict[str, tuple[Any, Any]] = {}
        for name, p in self._module.named_parameters() if self._names else ():
            layout, value = self.layouts.get(p), p.detach()
            divided = [] if layout is None else layout.groups(sharded=True)
            pieces = tuple((self._dims.index(_ranks(group)), group.rank()) for group in divided)
            sums = value.sum(dtype=torch.float64).item(), value.abs().sum(dtype=torch.float64).item()
            found[name] = pieces, sums
        return found


def check_version(stage: int, version: str = torch.__version__) -> None:
    """Refuse what the Dynamo of PyTorch 2.11 fails at: a product with a sharded weight that is to be a `DTensor`.

    Raises:
        ValueError: these versions, in stages 1 to 3.
    """
    if stage and version < "2.12":
        raise ValueError(
            f"DTensor parameters with stage={stage} and PyTorch {version}: its Dynamo fails at products of them. "
            "Expected PyTorch 2.13 or newer, or stage=0."
        )


def check_copies(everyone: Sequence[tuple[tuple[int, ...], dict[str, tuple[Any, Any]]]], *, sync: bool) -> None:
    """Refuse a model whose ranks have other values where they are to have copies: they would stay apart for good.

    ``everyone``: which part of the module each rank trains, and its `Apart.copies`. Of the ranks that train one part
    the first has what is taken, with ``sync``; without it each is compared with those of its place in the other parts.

    Raises:
        ValueError: a parameter of which copies differ.
    """
    seen: dict[Any, tuple[int, Any]] = {}
    places: dict[tuple[int, ...], int] = {}
    for rank, (part, copies) in enumerate(everyone):
        place = places[part] = places.get(part, -1) + 1
        for name, (piece, sums) in copies.items() if place == 0 or not sync else ():
            first, wanted = seen.setdefault((name, piece, place), (rank, sums))
            if wanted != sums:
                raise ValueError(
                    f"{name!r} has other values on rank {rank} than on rank {first}, and both have the same part of "
                    "it: a module with DTensors has alike on all ranks of the DTensors' dimensions what is not "
                    "divided over them. Initialise it from one seed; or make it a DTensor that is divided "
                    "(torch.distributed.tensor.distribute_tensor)."
                )


_DTENSORS_OWN = frozenset({"_is_param", "_spec", "_local_tensor"})


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _check(name: str, p: Any, layout: DTensorLayout, sharing: Sharing | None) -> None:
    """Refuse one DTensor. None: nothing of it is to be trained."""
    if p.is_meta and sharing is not None:
        raise ValueError(
            f"{name!r} is a DTensor on the meta device: expected one with values. Call module.to_empty(device=...) and "
            "initialise it, as for FSDP2, and then zerofx.compile."
        )
    if not layout.is_of_boxes:
        raise ValueError(
            f"{name!r} is a DTensor with the placements {layout.placements}: expected Shard and Replicate alone. "
            "Redistribute it before (DTensor.redistribute)."
        )
    ours = set() if sharing is None else set(dist.get_process_group_ranks(sharing.everyone.process_group))
    for group in layout.groups(sharded=False):
        theirs = dist.get_process_group_ranks(group)
        if len(both := sorted(ours.intersection(theirs))) > 1:
            raise ValueError(
                f"{name!r} is a DTensor over the ranks {theirs}, and zerofx is to share it over {sorted(ours)}: {both} "
                "are in both. Expected another dimension of the mesh: give zerofx its own one, "
                'zerofx.compile(model, mesh=mesh["dp"]), and do not call fully_shard.'
            )
    if p._backward_hooks or post_accumulate_hooks(p):
        raise ValueError(
            f"{name!r} is a DTensor with a hook on its gradient: it is exchanged for another parameter. Register the "
            "hook after zerofx.compile (register_post_accumulate_grad_hook)."
        )
    if p.grad is not None:
        raise ValueError(f"{name!r} has a gradient already: call zero_grad(set_to_none=True) first.")
