"""Strategies for Lightning's ``Fabric`` and ``Trainer``, in the place of ``"ddp"``.

::

    from zerofx.integrations.lightning import FabricStrategy, TrainerStrategy

    fabric = Fabric(strategy=FabricStrategy(), devices=2)          # stage 3; or FabricStrategy(zerofx={"stage": 2})
    trainer = Trainer(strategy=TrainerStrategy(), devices=2)       # was: strategy="ddp"

The module is sharded in place and compiled: so is each layer of a ``LightningModule``, for ``training_step`` calls
them as often as it calls ``self``.

=====================  =========================================================================================
``state_dict_type``    a checkpoint is
=====================  =========================================================================================
``"full"`` (default)   one file, as with any other strategy, with whole weights and moments, written by rank 0
``"sharded"``          a folder: of `zerofx.save`, for any number of ranks; and ``rest.ckpt`` with all else
=====================  =========================================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import plugins as fabric_plugins
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch import plugins as trainer_plugins
from lightning.pytorch.strategies import DDPStrategy as TrainerDDPStrategy
from torch import nn

from zerofx._torch import compile_module
from zerofx.checkpoint import full_state_dict, load, save
from zerofx.compiler.backend import Backend
from zerofx.compiler.options import Options
from zerofx.integrations.states import (
    OF_COMPILE,
    accumulating,
    checked_options,
    compile_once,
    full_optimizer_state,
    is_sharded,
    load_optimizer_state,
    pairs,
    unwrapped_optimizer,
)
from zerofx.runtime.state.group import groups_of

StateDictType = Literal["full", "sharded"]
REST = "rest.ckpt"
"""In a folder of shards, what Lightning itself has to save."""

_CLASHING = tuple(
    plugin
    for module in (fabric_plugins, trainer_plugins)
    for name in ("BitsandbytesPrecision", "DeepSpeedPrecision", "FSDPPrecision", "TransformerEnginePrecision")
    if (plugin := getattr(module, name, None)) is not None
)
"""Precision plugins that change the module, or want a strategy of their own."""


class _Zero:
    """What both strategies have in common."""

    _options: dict[str, Any]
    _state_dict_type: StateDictType
    parallel_devices: Any
    root_device: torch.device

    def _take(self, zerofx: Mapping[str, Any] | None, state_dict_type: StateDictType, ddp: dict[str, Any]) -> None:
        where = type(self).__name__
        self._options = checked_options(zerofx, f"{where}(zerofx=...)")
        if state_dict_type not in ("full", "sharded"):
            raise ValueError(f"{where}(state_dict_type={state_dict_type!r}): expected 'full' or 'sharded'.")
        self._state_dict_type = state_dict_type
        if ddp:
            name, value = next(iter(ddp.items()))
            raise ValueError(
                f"{where}({name}={value!r}): expected none of DistributedDataParallel's arguments, which zerofx takes "
                f"the place of. Leave it out; zerofx's options go into zerofx={{...}}."
            )

    def _check(self, precision: Any) -> Any:
        if isinstance(precision, _CLASHING):
            raise ValueError(
                f"the precision plugin {type(precision).__name__} with {type(self).__name__}: expected one that leaves "
                "the module's layers as they are: precision='32-true', '16-mixed', 'bf16-mixed', '16-true' or "
                "'bf16-true', or zerofx={'mixed_precision': zerofx.MixedPrecision(torch.bfloat16)}."
            )
        return precision

    def _to_device(self, module: nn.Module) -> None:
        if not any(p.is_meta for p in module.parameters()):
            module.to(self.root_device)

    def _compile(self, module: nn.Module) -> nn.Module:
        if is_sharded(module) or next(module.parameters(), None) is None:
            return module
        options = dict(self._options)
        if any(p.is_meta for p in module.parameters()):
            options.setdefault("device", self.root_device)
        compile_once(module, options)
        chosen: Options = groups_of(module)[0].family.recipe.options
        _compile_layers(module, Backend(chosen), {name: options[name] for name in OF_COMPILE if name in options})
        return module

    def _save_shards(self, folder: Path, modules: list[nn.Module], optimizers: list[Any]) -> None:
        for name, module, optimizer in pairs(modules, optimizers):
            save(folder / name, module, optimizer)

    def _load_shards(self, folder: Path, modules: list[nn.Module], optimizers: list[Any]) -> None:
        for name, module, optimizer in pairs(modules, optimizers):
            found = folder / name
            if not found.exists() and optimizer is None:  # saved with an optimizer, loaded without
                found = next(folder.glob(f"{name}_optimizer_*"), found)
            load(found, module, optimizer, rng=False)


def _compile_layers(module: nn.Module, backend: Backend, of_compile: Mapping[str, Any]) -> None:
    """Compile each layer of ``module`` by itself, too: for calls that do not come from its ``forward``.

    A compiled call inside of a compiled call is traced with that one, so nothing is compiled twice for it.
    """
    for layer in module.children():
        if isinstance(layer, (nn.ModuleList, nn.ModuleDict)):
            _compile_layers(layer, backend, of_compile)
        elif next(layer.parameters(), None) is not None:
            compile_module(layer, backend=backend, **of_compile)


class _SyncControl(_BackwardSyncControl):
    """``fabric.no_backward_sync``; see `accumulating`."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager:
        return (accumulating(module) if enabled else None) or contextlib.nullcontext()


class FabricStrategy(_Zero, FabricDDPStrategy):
    """Shards and compiles what ``fabric.setup`` is given.

    Args:
        zerofx: options of ``zerofx.compile``, such as ``{"stage": 2}``.
        state_dict_type: what ``fabric.save`` writes, see above.
        **kwargs: ``process_group_backend``, ``timeout`` and so on, as for Lightning's ``DDPStrategy``.

    Raises:
        ValueError: arguments of DistributedDataParallel; a precision plugin that changes layers.
    """

    def __init__(
        self,
        *,
        zerofx: Mapping[str, Any] | None = None,
        state_dict_type: StateDictType = "full",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._take(zerofx, state_dict_type, self._ddp_kwargs)
        self._backward_sync_control: Any = _SyncControl()

    @property
    def precision(self) -> Any:
        return super().precision

    @precision.setter
    def precision(self, precision: Any) -> None:
        inherited: Any = FabricDDPStrategy.precision
        inherited.fset(self, self._check(precision))

    def module_to_device(self, module: nn.Module) -> None:
        self._to_device(module)

    def setup_module(self, module: nn.Module) -> Any:
        """The module itself, sharded and compiled; optimizers that hold its parameters stay right."""
        return self._compile(module)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Whole weights on rank 0. A collective."""
        return full_state_dict(module) if is_sharded(module) else super().get_module_state_dict(module)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole state on rank 0. A collective."""
        return full_optimizer_state(unwrapped_optimizer(optimizer))

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        if self._state_dict_type == "full":
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if filter:
            raise ValueError("fabric.save(filter=...) with state_dict_type='sharded': expected 'full', or no filter.")
        modules, optimizers, rest = _divided(state)
        folder = Path(self.broadcast(path))
        self._save_shards(folder, modules, optimizers)
        super().save_checkpoint(folder / REST, rest, storage_options)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        folder = Path(self.broadcast(path))
        if folder.is_dir():
            if isinstance(state, (nn.Module, torch.optim.Optimizer)) or not state:
                raise ValueError(
                    f"fabric.load({str(folder)!r}) of a folder of shards: expected a dictionary of what to load into, "
                    "as it was saved."
                )
            modules, optimizers, rest = _divided(state)
            self._load_shards(folder, modules, optimizers)
            return _taken(state, rest, super().load_checkpoint(folder / REST, rest, strict, weights_only))
        if isinstance(state, torch.optim.Optimizer):
            state = {"": _Whole(state)}
            whole = self.checkpoint_io.load_checkpoint(folder, weights_only=weights_only)
            state[""].load_state_dict(whole)
            return {}
        if isinstance(state, dict):
            given = {k: _Whole(v) if isinstance(v, torch.optim.Optimizer) else v for k, v in state.items()}
            return _taken(state, given, super().load_checkpoint(folder, given, strict, weights_only))
        return super().load_checkpoint(folder, state, strict, weights_only)


class _Whole:
    """An optimizer as it is loaded from a file with its whole state."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = unwrapped_optimizer(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return full_optimizer_state(self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_optimizer_state(self.optimizer, state)


def _divided(state: dict[str, Any]) -> tuple[list[nn.Module], list[Any], dict[str, Any]]:
    """The modules and the optimizers of a state, in the order of its names, and the rest."""
    modules = [value for _, value in sorted(state.items()) if isinstance(value, nn.Module)]
    optimizers = [value for _, value in sorted(state.items()) if isinstance(value, torch.optim.Optimizer)]
    kinds = (nn.Module, torch.optim.Optimizer)
    return modules, optimizers, {name: value for name, value in state.items() if not isinstance(value, kinds)}


def _taken(state: dict[str, Any], given: dict[str, Any], remainder: dict[str, Any]) -> dict[str, Any]:
    """Plain values that Lightning has put into ``given`` go on to ``state``."""
    state.update({k: v for k, v in given.items() if not isinstance(v, _Whole) and v is not state.get(k)})
    return remainder


class TrainerStrategy(_Zero, TrainerDDPStrategy):
    """Shards and compiles the ``LightningModule`` that ``trainer.fit`` is given.

    Args:
        zerofx: options of ``zerofx.compile``, such as ``{"stage": 2}``.
        state_dict_type: what ``ModelCheckpoint`` and ``trainer.save_checkpoint`` write, see above.
        **kwargs: ``process_group_backend``, ``timeout`` and so on, as for Lightning's ``DDPStrategy``.

    Raises:
        ValueError: arguments of DistributedDataParallel; a precision plugin that changes layers; ``sync_batchnorm``.
    """

    def __init__(
        self,
        *,
        zerofx: Mapping[str, Any] | None = None,
        state_dict_type: StateDictType = "full",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._take(zerofx, state_dict_type, self._ddp_kwargs)

    @property
    def precision_plugin(self) -> Any:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        inherited: Any = TrainerDDPStrategy.precision_plugin
        inherited.fset(self, self._check(precision_plugin))

    def setup(self, trainer: Any) -> None:
        if self._layer_sync:
            raise ValueError(
                "Trainer(sync_batchnorm=True) with TrainerStrategy: expected False. Each rank keeps its own statistics "
                "under zerofx; use GroupNorm, or larger batches."
            )
        super(TrainerDDPStrategy, self).setup(trainer)  # without DistributedDataParallel

    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self._to_device(self.lightning_module)

    def _setup_model(self, model: nn.Module) -> Any:
        return self._compile(model)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """See `accumulating`."""
        assert self.lightning_module is not None
        with accumulating(self.lightning_module) or contextlib.nullcontext():
            yield

    # -------------------------------------------------------------------------------------- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights on rank 0; of a checkpoint of shards nothing, for `save_checkpoint` takes the module."""
        assert self.lightning_module is not None
        if not is_sharded(self.lightning_module):
            return super().lightning_module_state_dict()
        return full_state_dict(self.lightning_module) if self._state_dict_type == "full" else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole state on rank 0; of a checkpoint of shards nothing."""
        return full_optimizer_state(unwrapped_optimizer(optimizer)) if self._state_dict_type == "full" else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._state_dict_type == "full":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        assert self.lightning_module is not None
        folder = Path(self.broadcast(filepath))
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        self._save_shards(folder, [self.lightning_module], optimizers)
        super().save_checkpoint(checkpoint, folder / REST, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """A file, or a folder of shards: these are in the module, and in its optimizers, when it returns."""
        folder = Path(self.broadcast(checkpoint_path))
        if not folder.is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        self._load_shards(folder, [self.lightning_module], self.optimizers)
        return {**super().load_checkpoint(folder / REST, weights_only), _IN_PLACE: True}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if _IN_PLACE not in checkpoint:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if _IN_PLACE in checkpoint:
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_optimizer_state(unwrapped_optimizer(optimizer), state)

    def teardown(self) -> None:
        """As its parent's, but that the module stays where it is: shards are not moved."""
        if self.lightning_module is None or not is_sharded(self.lightning_module):
            super().teardown()
            return
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


_IN_PLACE = "zerofx: loaded in place"
"""In a checkpoint on its way through Lightning: weights and moments have been read where they belong."""
