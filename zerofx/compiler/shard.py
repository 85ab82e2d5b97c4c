"""Shard a module in place: every check first, then one group at a time.

::

    check     the options, the module, the ranks; all ranks agree       checks.py
    convert   group by group: rank 0's values, this rank's slices       runtime/state
    finish    buffers, values for the meta device, leaf modules, hooks
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerofx.compiler.wrappers  # it hears of every wrapper
import zerofx.runtime.eager.elementwise  # it answers for sharded tensors (state/callbacks.py)
import zerofx.runtime.optim.hooks  # noqa: F401  # they concern every optimizer from now on
from zerofx import _torch
from zerofx._torch import DTensorLayout, held, take_hooks
from zerofx.checkpoint import load
from zerofx.checkpoint.pretrained import save_whole
from zerofx.compiler.apart import Apart
from zerofx.compiler.checks import Planned, plan_alike
from zerofx.compiler.copies import Recipe
from zerofx.compiler.initialize import Template, initialize, replace_by_empty
from zerofx.compiler.options import Options
from zerofx.compiler.shadow import take_turns
from zerofx.compiler.subclasses import Subclasses
from zerofx.model.bitsandbytes import keep_packing
from zerofx.model.hugging_face import keep_in_step
from zerofx.model.ignored import ignored_in
from zerofx.model.layout import GroupLayout
from zerofx.model.memory import Memory
from zerofx.model.offload import Offload
from zerofx.model.policies import Policies
from zerofx.runtime.eager.averages import Averages, note_ignored
from zerofx.runtime.eager.leaf import leaf_names, make_leaves
from zerofx.runtime.eager.ondemand import average_by_hook, reduce_by_hook
from zerofx.runtime.eager.whole import Place, places_of
from zerofx.runtime.ranks.sharing import SETTLED, RankGroup, Sharing, sharing_of
from zerofx.runtime.state.group import Family, ShardGroup
from zerofx.runtime.state.parameter import ReplicatedParameter, ShardedTensor, replicate_parameter, shard_parameter
from zerofx.runtime.state.parts import say_so
from zerofx.runtime.state.weights import weights_of


def shard(module: nn.Module, **options: Any) -> nn.Module:
    """Shard ``module`` in place over the ranks, without compiling it; returns the same object.

    Each parameter becomes a `ShardedParameter`: same object, same name, full shape, and this rank's slice of the
    data. Groups are converted one at a time: peak extra memory is this rank's shard of the largest group.

    Args:
        module: an ``nn.Module`` whose parameters are on one device. On the meta device: it is initialised here, each
            rank keeping its slices alone; see `zerofx.compiler.initialize`.
        **options: see `Options`.

    Raises:
        RuntimeError: no process group; ranks whose models differ; a module of the meta device of which something was
            left uninitialised.
        ValueError: a module, or an option, that cannot be sharded; the message says why. Nothing has changed then.
    """
    shard_module(module, Options.of(options))
    return module


def shard_module(module: nn.Module, options: Options) -> list[ShardGroup]:
    """`shard` with checked options; returns the groups."""
    _torch.ask_as_torch_does()
    sharing = sharing_of(options.mesh, options.reduce_group)  # type: ignore[arg-type]  # a name: Options saw to it
    sharing = sharing.by(options.sharding, two_hops=options.two_hops) if options.stage else sharing.undivided()
    device = device_of(module, options.device, sharing.weights)
    apart, subclasses = Apart(module), Subclasses(module)
    try:
        planned = plan_alike(module, options, sharing, device, apart, subclasses)
    except BaseException:
        apart.undo()
        subclasses.undo()
        raise
    apart.settle()
    subclasses.settle()
    conversion = _Conversion(module, options, sharing, device, apart.layouts)
    groups = conversion.convert(planned)
    conversion.finish()
    return groups


PLACES: list[Callable[[Family, Sharing, torch.device, Sequence[GroupLayout]], Any]] = []
"""Of features: makes what is to hold state that does not live on the device, and returns what is to be kept of it."""


class _Conversion:
    """One module on its way from plain parameters to sharded ones.

    Attributes:
        places: where each parameter of the meta device stands; empty for a real module.
        layouts: of the parameters that stand for DTensors.
        templates: what each parameter of the meta device is to become.
        sync: whether rank 0's values are taken.
        kept: what features have made for the module, until its groups hold it.
    """

    def __init__(
        self,
        module: nn.Module,
        options: Options,
        sharing: Sharing,
        device: torch.device,
        layouts: dict[nn.Parameter, DTensorLayout],
    ) -> None:
        self.layouts = layouts
        self.module, self.options, self.sharing, self.device = module, options, sharing, device
        self.ignored = ignored_in(module, options.ignored)
        self.on_meta = next(module.parameters()).is_meta
        self.sync = options.init_sync and sharing.everyone.size > 1
        self.kept: list[Any] = []
        offload = Offload.of(options.offload)
        self.family = Family(options.stage, options.buckets, options.one_copy, options.wire, offload)
        self.family.recipe = Recipe(options, weakref.ref(module))
        memory = Memory.of(options.memory)
        self.family.footprint.limit = None if memory is None else memory.nbytes
        self.places: dict[Any, list[Place]] = places_of(module) if self.on_meta else {}
        self.templates: dict[nn.Parameter, Template] = {}

    def convert(self, planned: Planned) -> list[ShardGroup]:
        """Ranks meet, then every group is converted.

        Raises:
            RuntimeError: on every rank, where a feature cannot keep state elsewhere; nothing has changed then.
        """
        layouts = [layout for layout, _ in planned]
        self.kept = [place(self.family, self.sharing, self.device, layouts) for place in PLACES]
        watch = self.sharing.watch()
        if watch is not None:
            watch.families += 1
            self.family.number = watch.families
        if self.options.stage:
            self.sharing.connect(self.device)
        if self.options.uneven:
            take_turns(self.family, self.sharing.weights.name)
            self.family.footprint.apart = self.options.memory_budget is None
        return [
            self._convert_group(layout, parameters, part)
            for (layout, parameters), part in zip(planned, self._memory(planned), strict=True)
        ]

    def _memory(self, planned: Planned) -> Any:
        """What all groups get at once; see `Weights.allocate`."""
        case = weights_of(self.options.stage, self.options.one_copy, self.sharing)
        return case.allocate([layout for layout, _ in planned], self.sharing)

    def _convert_group(self, layout: GroupLayout, parameters: list[nn.Parameter], memory: Any) -> ShardGroup:
        """Peak extra memory is this rank's shard: a parameter is freed when its slice was taken."""
        group = ShardGroup(layout, self.sharing, self.device, self.family, memory)
        group.dtensors = {s: self.layouts[p] for s, p in zip(layout.slots, parameters) if p in self.layouts}
        for slot, parameter in zip(layout.slots, parameters, strict=True):
            group.gradients.hooks.adopt(slot, take_hooks(parameter))
            if self.on_meta:
                parameter, template = replace_by_empty(parameter, self.places[parameter], self.device)
                self.templates[parameter] = template
            elif self.sync:
                _broadcast(parameter, self.sharing.everyone)
            if self.options.stage:
                shard_parameter(parameter, group, slot)
                reduce_by_hook(parameter)  # type: ignore[arg-type]
            else:
                if self.on_meta:
                    parameter.data = self.templates[parameter].blank()
                replicate_parameter(parameter, group, slot)
                average_by_hook(parameter)  # type: ignore[arg-type]
        weights = group.weights
        if self.options.init_sync and not self.on_meta and weights.own_replica is not None and weights.code is None:
            weights.mark_fresh()
        return group

    def finish(self) -> None:
        """What is left to do once all parameters are sharded."""
        module, options = self.module, self.options
        if self.on_meta:
            self._initialize()
        make_leaves(module, leaf_names(module, options.leaf_modules), keep=options.memory_budget == math.inf)
        if self.sync:
            for buffer in module.buffers():
                _broadcast(held(buffer), self.sharing.everyone)
        self._average_ignored()
        keep_packing(module)
        for m in module.modules():
            m.register_load_state_dict_pre_hook(_refuse_assign)
        if options.stage == 3 and self.sharing.everyone.size > 1:
            keep_in_step(module)
        if options.stage and self.sharing.everyone.size > 1:
            save_whole(module)
        if options.stage == 0 and self.layouts:
            say_so(module)
        if options.mixed_precision is not None:
            self.family.casts = Policies(module, options.mixed_precision).install()
        for settle in SETTLED:
            settle()

    def _average_ignored(self) -> None:
        """What is not sharded stays plain; rank 0's values are taken of what is averaged."""
        for p in self.ignored:
            note_ignored(p)
        names = {p: name for name, p in self.module.named_parameters()}
        averaged = {names[p]: p for p, how in self.ignored.items() if how == "average"}
        for p in averaged.values() if self.sync else ():
            _broadcast(p, self.sharing.everyone)
        if averaged:
            self.family.averages = Averages(self.family, self.sharing.everyone, averaged)

    def _initialize(self) -> None:
        """Values for a module that had none."""
        init = self.options.init
        path = init if isinstance(init, (str, Path)) else None
        initialize(
            self.module,
            init if callable(init) else None,
            self.templates,
            self.device,
            self.sharing.everyone,
            from_rank_0=self.options.init_sync,
            buffers_alone=path is not None,
        )
        if path is not None:
            load(path, self.module, rng=False)


def device_of(module: nn.Module, device: torch.device | str | None, ranks: RankGroup) -> torch.device:
    """Where the shards are to be: with the parameters, or where a module of the meta device is to go."""
    first = next(module.parameters(), None) if isinstance(module, nn.Module) else None
    if first is None or not first.is_meta:
        return torch.device("cpu") if first is None else first.device
    if device is not None:
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or ranks.backend(accelerator) == "gloo":
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _broadcast(tensor: torch.Tensor, ranks: RankGroup) -> None:
    """Rank 0's values everywhere. A tensor that is not contiguous becomes so."""
    data = tensor.detach()
    if not data.is_contiguous():
        tensor.data = data = data.contiguous()
    sent = data.view(torch.uint8) if data.dtype.itemsize == 1 else data  # gloo has no floats of 8 bits
    dist.broadcast(sent, group=ranks.process_group, group_src=0)


def _refuse_assign(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """``load_state_dict(assign=True)`` would put plain parameters in the place of sharded ones."""
    if not metadata.get("assign_to_params_buffers"):
        return
    for name, p in module.named_parameters(recurse=False):
        if isinstance(p, (ShardedTensor, ReplicatedParameter)) and state.get(prefix + name, p) is not p:
            raise RuntimeError(
                f"load_state_dict(assign=True): {p._slot.name!r} is sharded, and would be replaced by a plain "
                "parameter, of which neither the optimizer nor zerofx knows. Use assign=False: it writes in place."
            )
