"""Modules that were built on the meta device: initialised one module at a time, a rank keeping its slices alone.

::

    with torch.device("meta"):
        model = Net()                    shapes and names, no memory
    zerofx.compile(model)

    for each module, its children before it, once:
        its own parameters whole  ──▶  init(module)  ──▶  each rank keeps its slices  ──▶  the next module

so a rank never holds more than its shards and the parameters of one module (not of its children). Every rank runs the
whole initialisation, all with the random state of rank 0. The law, bit by bit:

    the values are those that one process gets with rank 0's random state, from ``module.to_empty(device=...)`` and
    ``init`` on each module once, children before parents; of a tied parameter the first that is drawn counts.

That is what ordinary construction gives wherever constructors do no more than ``reset_parameters``, each module its
own, which holds for torch.nn; and it is Hugging Face's ``init_weights``. What ``init`` is:

==================================  =====================================================================
``init=``                           on each module
==================================  =====================================================================
None                                ``_init_weights`` of the Hugging Face model it is in; else its own
                                    ``reset_parameters``
a function                          that function, as ``module.apply`` would call it
a path (`zerofx.load`)              parameters and buffers from there; None for buffers that are not there
==================================  =====================================================================

A constructor's other work was lost on the meta device, and nothing may be left as memory was found: parameters start
as NaN, and whatever still is when all is done is refused by its name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofx._torch import pytree
from zerofx.model.hugging_face import is_model
from zerofx.runtime.eager.whole import Place, WholeParameter, in_place_of
from zerofx.runtime.ranks.sharing import RankGroup
from zerofx.runtime.state.home import all_resident
from zerofx.runtime.state.parameter import ShardedParameter

Init = Callable[[nn.Module], Any]


class Template:
    """What a parameter or buffer of the meta device is to become: a tensor like ``meta`` on ``device``."""

    def __init__(self, meta: torch.Tensor, device: torch.device) -> None:
        self.meta = meta
        self.device = device

    def blank(self) -> torch.Tensor:
        """Memory that says that nobody has written to it: NaN, or the largest integer."""
        blank = torch.empty_like(self.meta, device=self.device)
        if blank.dtype == torch.bool:
            return blank.fill_(False)
        return blank.fill_(torch.nan if _has_nan(blank) else torch.iinfo(blank.dtype).max)


def own_init(module: nn.Module, owner: Any) -> Callable[[], Any] | None:
    """What initialises ``module`` where the user does not say: see the table; None where nothing does.

    ``owner`` is the Hugging Face model that it is in, or None.
    """
    if owner is not None:
        return lambda: owner._initialize_weights(module)
    for name in ("reset_parameters", "_reset_parameters"):  # the second: torch.nn.MultiheadAttention, Transformer
        method = getattr(module, name, None)
        if callable(method):
            return method
    return None


def check_init(module: nn.Module, init: Any) -> None:
    """Refuse, before anything has changed, a module of the meta device that nothing would initialise.

    Raises:
        ValueError: naming a parameter or buffer.
    """
    if callable(init):
        return
    kept = set(module.state_dict())
    prefixes = {m: name for name, m in module.named_modules()}
    for m, owner in _children_first(module):
        tensors = [*m.named_parameters(recurse=False), *m.named_buffers(recurse=False)]
        names = [".".join(filter(None, (prefixes[m], name))) for name, x in tensors if x.is_meta]
        unknown = [name for name in names if init is None or name not in kept]
        if unknown and own_init(m, owner) is None:
            raise ValueError(
                f"{unknown[0]!r} is on the meta device, and its {type(m).__name__} has no reset_parameters(): give it "
                "one, or pass init=, a function that initialises the modules it is called with; or build the module on "
                "a real device."
            )


def replace_by_empty(
    parameter: nn.Parameter, places: list[Place], device: torch.device
) -> tuple[nn.Parameter, Template]:
    """A parameter of no elements on ``device`` in the place of one of the meta device, and what it is to become.

    It is the same object, so that whoever holds it holds the real one now. Not where there are weak references to it
    (`torch.nn.RNN` has some): those forbid it, and ``places`` get a new one, as with ``module.to_empty``.
    """
    empty = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=device), parameter.requires_grad)
    empty.__dict__.update(parameter.__dict__)
    try:
        torch.utils.swap_tensors(parameter, empty)
    except RuntimeError:
        for module, name in places:
            setattr(module, name, empty)
        parameter, empty = empty, parameter
    return parameter, Template(empty, device)


def initialize(
    module: nn.Module,
    init: Init | None,
    templates: dict[nn.Parameter, Template],
    device: torch.device,
    ranks: RankGroup,
    *,
    from_rank_0: bool = True,
    buffers_alone: bool = False,
) -> None:
    """Run ``init`` on each module; see the law above. A collective.

    Args:
        templates: what each parameter of ``module`` was on the meta device. The parameters are sharded by now; in
            stage 0 they are real and blank.
        from_rank_0: draw from rank 0's random state. The other ranks find theirs as it was, unless it was the same.
        buffers_alone: modules that have a buffer outside of ``state_dict`` and nothing else; the values of their
            parameters are dropped.

    Raises:
        RuntimeError: on every rank: what was left uninitialised, by name.
    """
    names = {p: name for name, p in module.named_parameters()}
    blanks = _place_buffers(module, device, buffers_alone)
    families = {p._group.family for p in templates if isinstance(p, ShardedParameter)}
    done: set[nn.Parameter] = set()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if from_rank_0:
            stack.enter_context(_rank_0_draws(ranks, device))
        for family in families:
            stack.enter_context(family.rewriting())
        for m, owner in _children_first(module):
            if not buffers_alone or any(buffer in blanks for buffer in m.buffers(recurse=False)):
                _one_module(m, init, owner, templates, done, names, buffers_alone)
    with all_resident(p._group.home for p in templates if isinstance(p, ShardedParameter)):
        blank = [n for p, n in names.items() if _is_blank(getattr(p, "_local", p.detach()))]
    unwritten = [] if buffers_alone else blank
    for name, b in module.named_buffers():
        if b.is_meta or (b in blanks and b._version == blanks[b] and _is_blank(b)):
            unwritten.append(name)
    unwritten += [
        f"{prefix}.{name}".lstrip(".")
        for prefix, m in module.named_modules()
        for name, value in vars(m).items()
        if name not in ("_parameters", "_buffers")
        and any(isinstance(x, torch.Tensor) and x.is_meta for x in pytree.tree_leaves(value))
    ]
    if left := next((names for names in ranks.all_gathered(unwritten) if names), None):
        raise RuntimeError(
            f"{left[0]!r} was built on the meta device and nothing has initialised it"
            f"{f' ({len(left) - 1} more)' if len(left) > 1 else ''}: what the constructor put there is lost. Have the "
            "module's reset_parameters() do it, or pass init=, or build the module on a real device. The module is "
            "half initialised now: build it again."
        )


def _one_module(
    m: nn.Module,
    init: Init | None,
    owner: Any,
    templates: dict[nn.Parameter, Template],
    done: set[nn.Parameter],
    names: dict[nn.Parameter, str],
    scratch: bool,
) -> None:
    """``init`` on one module while its own parameters are whole; each rank keeps its slices."""
    run: Any = own_init(m, owner) if init is None else lambda: init(m)
    if run is None:
        return
    places: dict[Any, list[str]] = {}
    for name, p in m.named_parameters(recurse=False, remove_duplicate=False):
        if p in templates and (isinstance(p, ShardedParameter) or p in done):
            places.setdefault(p, []).append(name)
    with contextlib.ExitStack() as stack:
        wholes = {p: WholeParameter(templates[p].blank(), p.requires_grad) for p in places}
        for p, whole in wholes.items():
            stack.enter_context(in_place_of(p, whole, [(m, name) for name in places[p]]))
        run()
        for p, whole in wholes.items():
            if any(getattr(m, name) is not whole for name in places[p]):
                raise RuntimeError(
                    f"initialising {type(m).__name__} put another parameter in the place of {names[p]!r}: write to the "
                    "parameter in place."
                )
            if p not in done and not scratch:  # a tied one's second draw is made, and dropped
                p.copy_(whole.detach())
    done.update(p for _, p in m.named_parameters(recurse=False))


def _children_first(module: nn.Module, owner: Any = None, seen: set[nn.Module] | None = None) -> Iterator[Any]:
    """Every module once, as ``module.apply`` visits them, with the Hugging Face model that it is in."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    if is_model(module):
        owner = module
    for child in module.children():
        yield from _children_first(child, owner, seen)
    yield module, owner


def _place_buffers(module: nn.Module, device: torch.device, not_kept: bool) -> dict[torch.Tensor, int]:
    """Put blank memory in the place of each buffer of the meta device; returns it, with its version.

    ``not_kept``: return only what is outside of ``state_dict``; the rest is about to be loaded.
    """
    kept = set(module.state_dict())
    made: dict[torch.Tensor, torch.Tensor] = {}
    blanks: dict[torch.Tensor, int] = {}
    for prefix, m in module.named_modules():
        for name, buffer in list(m.named_buffers(recurse=False, remove_duplicate=False)):
            if not buffer.is_meta:
                continue
            if buffer not in made:
                made[buffer] = Template(buffer, device).blank()
                if not (not_kept and ".".join(filter(None, (prefix, name))) in kept):
                    blanks[made[buffer]] = made[buffer]._version
            setattr(m, name, made[buffer])
    return blanks


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_blank(tensor: torch.Tensor) -> bool:
    """Whether any element is as `Template.blank` made it; of booleans, which have no such value: True."""
    if tensor.dtype == torch.bool:
        return tensor.numel() > 0
    return bool((tensor.isnan() if _has_nan(tensor) else tensor == torch.iinfo(tensor.dtype).max).any())


@contextlib.contextmanager
def _rank_0_draws(ranks: RankGroup, device: torch.device) -> Iterator[None]:
    """Random numbers inside are rank 0's; a rank whose generators were in another state finds them in it again."""
    states = _random_state(device)
    box: list[Any] = [states]
    if ranks.size > 1:
        dist.broadcast_object_list(box, group=ranks.process_group, group_src=0)
    differs = not all(map(torch.equal, states, box[0]))
    if differs:
        _set_random_state(box[0], device)
    try:
        yield
    finally:
        if differs:
            _set_random_state(states, device)


def _random_state(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _set_random_state(states: list[torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
