"""``Accelerator`` of Hugging Face's accelerate, with zerofx in the place of DistributedDataParallel.

::

    from zerofx.integrations.accelerate import Accelerator      # was: from accelerate import Accelerator

    accelerator = Accelerator()                                 # stage 3; or zerofx={"stage": 2, ...}
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

What it does otherwise than its parent:

====================  ==========================================================================================
``prepare``           the model is sharded in place and compiled; nothing is wrapped around it
``accumulate``        as `zerofx.no_sync` in stages 0 and 1; in 2 and 3 each micro-batch is reduced
hooks of states       get the models; those for saving also whole weights, on rank 0. Taking one out of a list changes
                      nothing: what zerofx saves is saved, and what a hook loads counts
``get_state_dict``    whole weights on rank 0
``save_state``        weights and optimizers by `zerofx.save`, each rank its shards; the rest as ever, with whole
                      tensors where a registered object has sharded ones
``load_state``        the same back, on any number of ranks; folders of a plain ``Accelerator``, too
====================  ==========================================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn
from torch.utils.data import DataLoader

from zerofx._torch import pytree
from zerofx.checkpoint import full_state_dict, load, save
from zerofx.compiler.api import synchronizing
from zerofx.integrations.peft import checkpointed
from zerofx.integrations.states import (
    accumulating,
    checked_options,
    compile_once,
    first_batch,
    is_sharded,
    lacks_batch,
    load_optimizer_state,
    pairs,
    unwrapped_optimizer,
)
from zerofx.runtime.state.parameter import ShardedTensor

FOLDER = "zerofx"
"""Where in a folder of ``save_state`` zerofx's own are."""

_OTHERS = {
    DistributedType.FSDP: "FSDP (fsdp_plugin=, or `accelerate launch --use_fsdp`)",
    DistributedType.DEEPSPEED: "DeepSpeed (deepspeed_plugin=, or `accelerate launch --use_deepspeed`)",
    DistributedType.MEGATRON_LM: "Megatron-LM (megatron_lm_plugin=)",
    DistributedType.XLA: "XLA",
}


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` whose ``prepare`` shards and compiles models with zerofx.

    In one process that is not distributed it is its parent: there is nothing to shard.

    Args:
        zerofx: options of ``zerofx.compile``, such as ``{"stage": 2}``.
        **kwargs: as its parent's.

    Raises:
        ValueError: what does not go together with zerofx: FSDP, DeepSpeed, Megatron-LM, a ``ParallelismConfig`` of more
            than data parallelism, another compiler.
    """

    def __init__(self, *args: Any, zerofx: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        options = checked_options(zerofx, "Accelerator(zerofx=...)", loads=True)
        for name in ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"Accelerator({name}={type(kwargs[name]).__name__}): expected None, for zerofx shards the model "
                    "itself. Leave it out, and choose a stage with zerofx={'stage': 3}."
                )
        super().__init__(*args, **kwargs)
        self._take(options)

    @classmethod
    def of(cls, accelerator: accelerate.Accelerator, zerofx: Mapping[str, Any] | None = None) -> Accelerator:
        """``accelerator``, made by somebody else, as one of these. Nothing may be prepared yet."""
        options = checked_options(zerofx, "zerofx", loads=True)
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator._take(options)
        return accelerator

    def _take(self, options: dict[str, Any]) -> None:
        self.zerofx_options = options
        self._zerofx_loader: DataLoader | None = None
        other = _OTHERS.get(self.distributed_type)
        if other is not None:
            raise ValueError(
                f"this Accelerator was set up for {other}: expected plain data parallelism, for zerofx shards the "
                "model itself. Leave that out, and choose a stage with zerofx={'stage': 3}."
            )
        config = self.parallelism_config
        if config is not None and any(getattr(config, f"{kind}_enabled", False) for kind in ("tp", "cp", "sp")):
            raise ValueError(
                f"parallelism_config={config!r}: expected data parallelism alone. zerofx shards over one dimension of "
                "ranks; leave parallelism_config out."
            )
        backend = self.state.dynamo_plugin.backend
        if backend != DynamoBackend.NO:
            raise ValueError(
                f"the compiler {backend.value!r} was chosen (dynamo_backend=, dynamo_plugin=, torch_compile=, or "
                "ACCELERATE_DYNAMO_BACKEND): expected none, for zerofx compiles the model with Inductor itself. Leave "
                "it out; zerofx={'executor': 'eager'} runs graphs without Inductor."
            )

    # ------------------------------------------------------------------------------------------ prepare

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As ever. The first loader of all is the one that options are chosen by, where "batch" is not given."""
        if self._zerofx_loader is None:  # its truth would be its length, which not every loader has
            self._zerofx_loader = next((x for x in args if isinstance(x, DataLoader)), None)
        return super().prepare(*args, **kwargs)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model itself: on its device, with autocast where mixed precision was asked for, sharded and compiled.

        In ``evaluation_mode`` too: a model of stage 3 may not fit whole.
        """
        if not self.use_distributed:
            return super().prepare_model(model, device_placement, evaluation_mode)
        options = dict(self.zerofx_options)
        if any(p.is_meta for p in model.parameters()):
            device_placement = False
            options.setdefault("device", self.device)
        if lacks_batch(options):
            options["batch"] = first_batch(self._zerofx_loader)
        model = super().prepare_model(model, device_placement, evaluation_mode=True)
        return compile_once(model, options)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """See `zerofx.integrations.states.accumulating`."""
        if not is_sharded(model):
            with super().no_sync(model):
                yield
            return
        with accumulating(model) or contextlib.nullcontext():
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """A backward inside reduces the gradients, with what `no_sync` has kept, inside of that as well."""
        with (
            synchronizing(model, True) if is_sharded(model) else accelerate.Accelerator.trigger_sync_in_backward(model)
        ):
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Whole weights, plain tensors on the CPU, on rank 0; {} on the others. A collective."""
        if not is_sharded(model):
            return super().get_state_dict(model, unwrap)
        return full_state_dict(model)

    # -------------------------------------------------------------------------------------- checkpoints

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As its parent's, but that weights and optimizers are in the folder ``zerofx`` of it, as shards."""
        if not any(map(is_sharded, self._models)):
            return super().save_state(output_dir, safe_serialization, **kwargs)
        models, optimizers = self._models, self._optimizers
        weights = [self.get_state_dict(m, unwrap=False) for m in models] if self._save_model_state_pre_hook else []
        with self._set_aside(), _handing(self._save_model_state_pre_hook, models, weights):
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        for name, model, optimizer in pairs(models, optimizers):
            save(Path(folder) / FOLDER / name, checkpointed(model), optimizer)
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: dict | None = None, **kwargs: Any) -> None:
        """As its parent's; of a folder that any ``Accelerator`` wrote, on any number of ranks."""
        if not any(map(is_sharded, self._models)):
            super().load_state(input_dir, load_kwargs, **kwargs)
            return
        models, optimizers = self._models, self._optimizers

        def load_ours(_: list[nn.Module], folder: str) -> None:
            if not (Path(folder) / FOLDER).is_dir():
                _load_plain(Path(folder), models, optimizers)
                return
            for name, model, optimizer in pairs(models, optimizers):
                load(Path(folder) / FOLDER / name, checkpointed(model), optimizer, rng=False)

        # The parent tells hooks alone which folder it chose. A hook that loads a model by itself has the last word.
        with self._set_aside(), _handing(self._load_model_state_pre_hook, list(models), first=load_ours):
            super().load_state(input_dir, load_kwargs, **kwargs)

    @contextlib.contextmanager
    def _set_aside(self: Any) -> Iterator[None]:
        """The parent sees neither models nor optimizers, and of registered objects whole states."""
        before = self._models, self._optimizers, self._custom_objects
        self._models, self._optimizers, self._custom_objects = [], [], [_Whole(each) for each in self._custom_objects]
        try:
            yield
        finally:
            self._models, self._optimizers, self._custom_objects = before


class _Whole:
    """A registered object, an average of weights say: its sharded tensors are whole in a file, and shards again."""

    def __init__(self, registered: Any) -> None:
        self._registered = registered

    def state_dict(self) -> Any:
        """A collective."""
        state = self._registered.state_dict()
        return pytree.tree_map_only(ShardedTensor, lambda x: x.full_tensor(), state)

    def load_state_dict(self, state: Any) -> None:
        there = self._registered.state_dict()
        if pytree.tree_structure(there) == pytree.tree_structure(state):
            state = pytree.tree_map(_as_there, there, state)
        self._registered.load_state_dict(state)


def _as_there(there: Any, whole: Any) -> Any:
    """``whole``, sharded as what is ``there``."""
    return torch.empty_like(there).copy_(whole) if isinstance(there, ShardedTensor) else whole


@contextlib.contextmanager
def _handing(hooks: dict[int, Any], *lists: list[Any], first: Any = None) -> Iterator[None]:
    """The ``hooks`` of states get ``lists`` in the place of what the parent has, which is empty.

    ``first`` runs ahead of them, as the parent would call it.
    """
    before = dict(hooks)
    hooks.clear()
    hooks.update({-1: first} if first is not None else {})
    hooks.update({i: lambda *given, hook=hook: hook(*lists, given[-1]) for i, hook in before.items()})
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(before)


def _load_plain(folder: Path, models: list[nn.Module], optimizers: list[Any]) -> None:
    """What a plain ``Accelerator`` saved: whole weights, whole states."""
    for i, model in enumerate(models):
        ending = f"_{i}" if i else ""
        whole = folder / f"model{ending}.safetensors"
        load(whole if whole.exists() else folder / f"pytorch_model{ending}.bin", model, rng=False)
    for i, optimizer in enumerate(optimizers):
        file = folder / (f"optimizer_{i}.bin" if i else "optimizer.bin")
        load_optimizer_state(unwrapped_optimizer(optimizer), torch.load(file, map_location="cpu", weights_only=True))
