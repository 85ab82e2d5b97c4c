"""Which part of a module has which policy of mixed precision.

::

    mixed_precision={"": MixedPrecision(torch.bfloat16), nn.LayerNorm: None, "head": MixedPrecision(torch.float32)}

    model                       bfloat16
    ├── layers.0.attention      bfloat16
    ├── layers.0.norm           as its parameters are: inputs cast to float32, outputs cast back to bfloat16
    └── head                    float32: inputs cast to it, outputs cast back

A *part* is a module that a rule is about, with all that is in it: a module class, or a pattern of names
(`zerofx.model.rules`). "" is the whole module; without it that has no policy, as with None. Where two rules are about
one module, the last one given wins, so that exceptions stand after what they are exceptions of. A part in a part is a
part of its own, if another rule is about it. Of a container without a forward (``nn.ModuleList``) each module is one.

What a part computes in is its ``param_dtype``; without one it is its parameters' own dtype. Its inputs are cast to
that, and its outputs to ``output_dtype``, else to what the module around it computes in. (With FSDP2 they would stay as
they are, and the next bfloat16 layer would meet float32 inputs.)

A parameter's policy is that of the part which it is in. The parameters of one group have one policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zerofx.model.precision import MixedPrecision, cast_floats, keeps_dtype
from zerofx.model.rules import Rule, is_rule, matched

Policy = MixedPrecision | Mapping[Rule, MixedPrecision | None]
"""What ``mixed_precision=`` may be."""


def check_policies(given: Any) -> None:
    """Refuse what is neither a policy, nor policies by rules (ValueError)."""
    if given is None or isinstance(given, MixedPrecision):
        return
    known = isinstance(given, Mapping) and len(given) > 0 and all(map(is_rule, given))
    if not known or not all(policy is None or isinstance(policy, MixedPrecision) for policy in given.values()):
        raise ValueError(
            f"mixed_precision={given!r}: expected None, or a zerofx.MixedPrecision, such as "
            "mixed_precision=zerofx.MixedPrecision(torch.bfloat16); or one for each part, by module classes and "
            'patterns of names, such as {"": zerofx.MixedPrecision(torch.bfloat16), nn.LayerNorm: None}.'
        )


class Policies:
    """The policies of one module's parts.

    Attributes:
        module: the whole.
        parts: the name of the module that is a part -> its policy, outer ones first. The whole is one: "".
    """

    def __init__(self, module: nn.Module, given: Policy | None) -> None:
        """Raises ValueError: no policies; a rule about no module; a parameter of two names in parts of two policies."""
        check_policies(given)
        self.module = module
        rules: Mapping[Rule, MixedPrecision | None] = given if isinstance(given, Mapping) else {"": given}
        modules = list(module.named_modules(remove_duplicate=False))
        last: dict[str, Rule] = {}
        for rule in rules:
            last |= dict.fromkeys(matched("mixed_precision", rule, module, modules), rule)
        self.parts: dict[str, MixedPrecision] = {"": (rules[last[""]] if "" in last else None) or MixedPrecision()}
        self._part_of: dict[str, str] = {"": ""}
        for name, _ in modules[1:]:  # a module comes before what is in it
            part = self._around(name)
            if part and not _is_called(module.get_submodule(part)):
                last.setdefault(name, last[part])
            elif last.get(name, last.get(part)) == last.get(part):
                self._part_of[name] = part
                continue
            self._part_of[name] = name
            self.parts[name] = rules[last[name]] or MixedPrecision()
        self._check_ties()

    def of(self, parameter: str) -> MixedPrecision:
        """The policy of the parameter of that name."""
        return self.parts[self._around(parameter)]

    def _around(self, name: str) -> str:
        """The part that a module, or a parameter, is in."""
        return self._part_of[name.rpartition(".")[0]]

    def _check_ties(self) -> None:
        first: dict[nn.Parameter, str] = {}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            one, other = (self.of(n) for n in (first.setdefault(p, name), name))
            if (one.param_dtype, one.reduce_dtype) != (other.param_dtype, other.reduce_dtype):
                raise ValueError(
                    f"mixed_precision: {first[p]!r} and {name!r} are one parameter, with two policies, {one} and "
                    f"{other}: expected one policy, for it is gathered and reduced once. Give both modules the same."
                )

    def install(self) -> Casts:
        """Have every part cast what it is called with and what it returns, for as long as the result is `Casts.on`."""
        casts = Casts()
        hooked: set[nn.Module] = set()
        for name, policy in self.parts.items():
            part = self.module.get_submodule(name)
            if part in hooked:  # under another name
                continue
            hooked.add(part)
            inputs, outputs = policy.casts(*self._computed(name))
            if inputs is not None:
                part.register_forward_pre_hook(Cast(casts, inputs).inputs, with_kwargs=True, prepend=True)
            if outputs is not None:
                part.register_forward_hook(Cast(casts, outputs).outputs)
        return casts

    def _computed(self, part: str) -> tuple[torch.dtype | None, torch.dtype | None]:
        """What a part computes in, and what the module around it does; of the whole what its policy says."""
        if not part:
            return self.parts[part].param_dtype, None
        around = self._around(part)
        while around and not _is_called(self.module.get_submodule(around)):
            around = self._around(around)
        return tuple(self.parts[at].param_dtype or self._own_dtype(at) for at in (part, around))  # type: ignore

    def _own_dtype(self, part: str) -> torch.dtype | None:
        """That of its parameters; of a part without any that of those around it. None: they have several."""
        named = self.module.named_parameters(remove_duplicate=False)
        own = {p.dtype for name, p in named if self._around(name) == part and not keeps_dtype(p)}
        if not own and part:
            return self._own_dtype(self._around(part))
        return own.pop() if len(own) == 1 else None


def _is_called(module: nn.Module) -> bool:
    """Whether it has a forward: a ``ModuleList`` casts nothing, so what is in it does."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


class Casts:
    """Whether the parts of a module cast. False while it has its masters for weights (`zerofx.unsharded`)."""

    def __init__(self) -> None:
        self.on = True


class Cast:
    """A hook of a part: what it casts to, and while what is on."""

    def __init__(self, casts: Casts, dtype: torch.dtype) -> None:
        self.casts, self.dtype = casts, dtype

    def inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A forward pre-hook."""
        if not self.casts.on:
            return args, kwargs
        dtype = self.dtype
        return tuple(cast_floats(x, dtype) for x in args), {name: cast_floats(x, dtype) for name, x in kwargs.items()}

    def outputs(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        """A forward hook."""
        return cast_floats(outputs, self.dtype) if self.casts.on else outputs
