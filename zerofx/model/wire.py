"""What travels in codes of fewer bits: weights on their way to other ranks, and gradients.

::

    zerofx.compile(model, wire=zerofx.Wire(weights="int8", gradients="int4"))

=============  ========================  ==================================================
code           bytes, of float32's       a block of 256 is off by at most, a its largest |x|
=============  ========================  ==================================================
``"bf16"``     0.5                       |x| / 256
``"fp8"``      0.254                     |x| / 16
``"int8"``     0.254                     a / 254
``"int4"``     0.129                     a / 14
=============  ========================  ==================================================

Parameters of fewer than ``BLOCKED_NUMEL`` elements (norms, biases) travel as they are.

Of weights, ``"int4"`` is the code of what a step has changed, not of the weights: a is the largest change of the block.
It needs the weights as they were sent before, whole, which stages 1 and 2 have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from zerofx.kernels.code import Code
from zerofx.model.layout import BLOCKED_NUMEL, GroupLayout

Coding = Literal["bf16", "fp8", "int8", "int4"]
Between = Literal["all", "nodes"]

_CODINGS = ("bf16", "fp8", "int8", "int4")
_SMALLEST_BLOCK = 32


@dataclass(frozen=True)
class Wire:
    """Codes for weights and gradients; None: they travel as they are.

    Attributes:
        weights: what a rank sends of its shard. All ranks compute with what was sent, its owner too; the optimizer
            keeps the exact weights. ``"int4"``: of what changed since it was sent last; stages 1 and 2.
        gradients: what a rank sends of its gradients. What arrives is summed in float32, in the order of ranks; a rank
            adds its own part as it is.
        block: elements that share a scale: even, 32 or more.
        stochastic: round gradients in int8 and int4 up with the probability of what is cut off. None: in int4 alone,
            without ``error_feedback``.
        error_feedback: add what a gradient's code cut off to the rank's next gradient. A rank keeps that:
            4 N (M - 1)/M bytes.
        between: between which ranks codes are used. ``"all"``; or, on a mesh of two dimensions, ``"nodes"``: by the
            collectives that ranks of several rows take part in. What stays inside of a row travels as it is.
    """

    weights: Coding | None = None
    gradients: Coding | None = None
    block: int = 256
    stochastic: bool | None = None
    error_feedback: bool = False
    between: Between = "all"

    def __post_init__(self) -> None:
        for name in ("weights", "gradients"):
            found = getattr(self, name)
            if found is not None and found not in _CODINGS:
                expected = ", ".join(map(repr, _CODINGS))
                raise ValueError(f"Wire({name}={found!r}): expected one of {expected}, or None.")
        if not isinstance(self.block, int) or self.block < _SMALLEST_BLOCK or self.block % 2:
            raise ValueError(f"Wire(block={self.block!r}): expected an even number of elements, 32 or more.")
        if self.stochastic is not None and not isinstance(self.stochastic, bool):
            raise ValueError(f"Wire(stochastic={self.stochastic!r}): expected True, False or None.")
        if self.between not in ("all", "nodes"):
            raise ValueError(f"Wire(between={self.between!r}): expected 'all' or 'nodes'.")
        self._check_feedback()

    def _check_feedback(self) -> None:
        if not isinstance(self.error_feedback, bool):
            raise ValueError(f"Wire(error_feedback={self.error_feedback!r}): expected True or False.")
        if self.error_feedback and self.gradients is None:
            raise ValueError(
                "Wire(error_feedback=True) without gradients=: of gradients as they are nothing is cut off. "
                'Choose a code for them, gradients="int4" for one.'
            )
        if self.error_feedback and self.stochastic:
            raise ValueError(
                "Wire(error_feedback=True, stochastic=True): what is cut off is in the next gradient already, and "
                "to round at random would only make it more. Leave one of both out."
            )

    @property
    def of_changes(self) -> bool:
        """Whether weights are sent as what has changed."""
        return self.weights == "int4"

    def in_stage(self, stage: int) -> Wire | None:
        """What of it there is in ``stage``: nothing in stage 0, and in stage 3 no codes of changes."""
        if stage == 0:
            return None
        return replace(self, weights=None) if stage == 3 and self.of_changes else self

    @property
    def weight_code(self) -> Code | None:
        """How weights are written."""
        return None if self.weights is None else Code(self.weights, self.block)

    @property
    def gradient_code(self) -> Code | None:
        """How gradients are written."""
        if self.gradients is None:
            return None
        stochastic = self.gradients == "int4" if self.stochastic is None else self.stochastic
        stochastic = stochastic and not self.error_feedback
        return Code(self.gradients, self.block, stochastic and self.gradients.startswith("int"))


def sent_whole(layout: GroupLayout) -> list[range]:
    """The ranges of a flat buffer that travel as they are: small parameters, and what is between neighbours of them."""
    ranges: list[range] = []
    joins = False
    for slot in layout.slots:
        small = slot.numel < BLOCKED_NUMEL
        if small and joins:
            ranges[-1] = range(ranges[-1].start, slot.end)
        elif small:
            ranges.append(range(slot.offset, slot.end))
        joins = small
    return [r for r in ranges if r]
