"""One call that decides: stage, what stays gathered, what is computed again, schemes of a mesh, what is offloaded.

::

    choice = zerofx.choose(model, *inputs, world_size=8, memory="80GB")      # any device, "meta" too; no process group
    print(choice)                                                            # what, what it takes, what comes next
    zerofx.compile(model, **choice.options)

    zerofx.compile(model, memory="80GB", batch=inputs)                       # the same at once, alike on all ranks

What the user gives is kept. Equal inputs give equal choices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zerofx._torch import NotOneGraph
from zerofx.compiler.auto import AUTO, OPEN
from zerofx.inspect.choose.alternatives import Question
from zerofx.inspect.choose.choice import Choice, best_first
from zerofx.inspect.choose.nearest import refuse
from zerofx.inspect.predict.kept import kept_rates
from zerofx.model.memory import Memory
from zerofx.simulate.clock import Rates, ordinary


def choose(
    module: nn.Module,
    *args: Any,
    world_size: int | tuple[int, int],
    memory: int | str | Memory,
    call: dict[str, Any] | None = None,
    rates: Rates | None = None,
    backend: str | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Choice:
    """How to train ``module`` within ``memory``: of all that fits what is fastest, as `zerofx.predict` has it.

    Allocates neither parameters nor activations, needs no process group, and leaves ``module`` as it is. It takes a
    dry run per alternative: about as long as compiling two to four times.

    Args:
        module: on any device, the meta device included. Where it is several graphs, what runs outside of
            them runs on zeros, can read no weights, and is not counted.
        *args: what it is called with; tensors on the meta device will do, for only their shapes and dtypes count.
        world_size: over how many ranks it is sharded; or, as of a mesh of two dimensions, how many replicas there are,
            and over how many ranks each is sharded.
        memory: bytes of each rank's device, a text such as "80GB", or a `zerofx.Memory`.
        call: keyword arguments that it is called with.
        rates: of `zerofx.calibrate`. None: those of ``memory``; else those that ``zerofx.calibrate(keep=True)`` has
            kept for as many ranks; else an ordinary machine's.
        backend: of communication. None: "gloo" on the CPU, "nccl" elsewhere.
        device: what the graphs are for. None: the module's; of the meta device this machine's accelerator, or the CPU.
        **options: as they would be given to `zerofx.compile`. They are kept. ``stage`` may be "auto", its default here.
            ``offload`` may be a place, which is used where nothing fits without; a `zerofx.Offload` is kept.
            ``wire`` may be "auto": collectives are quantized to int8 where a step is 5 percent faster for it.

    Returns:
        The choice: ``print`` it, and give its ``options`` to `zerofx.compile`.

    Raises:
        ValueError: nothing fits; the message has what would. Or options that do not go together.
    """
    asked = Memory.of(memory)
    if asked is None:
        raise ValueError("memory=None: expected bytes of each rank's device, for what does not fit is not chosen.")
    place = _device(module, device)
    ranks = world_size[0] * world_size[1] if isinstance(world_size, tuple) else world_size
    rates, rates_of = rates_for(replace(asked, rates=rates or asked.rates), place, ranks)
    question = Question(
        module=module,
        args=args,
        call=call or {},
        world_size=world_size,
        memory=replace(asked, rates=rates),
        backend=backend or ("gloo" if place.type == "cpu" else "nccl"),
        device=place,
        probe=place.type == "cpu" and not any(p.is_meta for p in module.parameters()),
        given=options,
    )
    try:
        alternatives = question.alternatives()
    except NotOneGraph:
        question = replace(question, whole=False)
        alternatives = question.alternatives()
    if all(each.division is None for each in alternatives):
        refuse(question, alternatives)
    given = {name: value for name, value in options.items() if name not in OPEN or value != AUTO}
    what = f"{type(module).__name__} on {question.ranks}"
    return Choice(given, best_first(alternatives), question.memory, what, rates_of)


def rates_for(memory: Memory, device: torch.device, ranks: int) -> tuple[Rates, str]:
    """The rates that count for so many ``ranks``, and where they are from, in words."""
    usual = ordinary(device.type)
    if (rates := memory.rates) is not None:
        words = "as they were given"
    elif (rates := kept_rates(device.type, ranks)) is not None:
        words = "of this machine, kept by zerofx.calibrate"
    else:
        return usual, "of an ordinary machine: zerofx.calibrate(keep=True) measures this one"
    if rates.disk_bytes_per_s is None:
        rates = replace(rates, disk_bytes_per_s=usual.disk_bytes_per_s)
    return rates, words


def _device(module: nn.Module, device: torch.device | str | None) -> torch.device:
    """Without a number: what is chosen is alike on all ranks."""
    first = next(module.parameters(), None)
    if device is None and first is not None and not first.is_meta:
        device = first.device
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return torch.device(torch.device(device).type)
