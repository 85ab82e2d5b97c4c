"""Which parameters are matrices to orthogonalize, and which blocks of them: what `zerofx.Muon` goes by.

::

    layers.0.attention.qkv.weight   (768, 256)   a matrix; three of (256, 256) with splits={"*.qkv.weight": 3}
    layers.0.norm.weight            (256,)       no matrix
    embedding.weight                (5000, 256)  an embedding's: a gradient's row is of one token, and mostly zero
    lm_head.weight                  (5000, 256)  the output's; if tied, it is the embedding's

Input and output go by AdamW because that is better, as Jordan et al. found (https://kellerjordan.github.io/posts/muon/).
In a module they are known by class (`torch.nn.Embedding`, ``get_output_embeddings()``), and everywhere by name.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerofx.runtime.optim.orthogonalize import matrix_shape

TABLES = ("*embed", "*embedding", "*embeddings", "*emb", "embed_*", "wte", "wpe")
HEADS = ("lm_head", "embed_out", "unembed", "unembedding")
TOP_HEADS = ("head", "heads", "output", "output_layer", "classifier", "score")
"""Names of modules whose weights are no matrices to orthogonalize; those of `TOP_HEADS` in the model itself alone."""

Splits = Mapping[str, int | Sequence[int]]


@dataclass(frozen=True)
class Form:
    """How a parameter is seen as matrices.

    Attributes:
        flat: all dimensions but the first are columns (a convolution's).
        sizes: the rows of each block that is orthogonalized by itself; None: there is one.
    """

    flat: bool = False
    sizes: tuple[int, ...] | None = None

    def blocks(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Views of ``whole``: one after another, they are its rows."""
        x = whole.flatten(1) if self.flat else whole
        return [x] if self.sizes is None else list(x.split(self.sizes, dim=-2))

    def joined(self, blocks: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
        """The inverse of `blocks`."""
        return (blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), dim=-2)).reshape(shape)

    def shapes(self, shape: torch.Size) -> list[tuple[int, int]]:
        """Rows and columns of each block."""
        _, rows, columns = matrix_shape(shape, self.flat)
        return [(size, columns) for size in self.sizes or (rows,)]


class Rule:
    """Tells matrices from others, by patterns first, then by class and name.

    Args:
        matrices, others: patterns (fnmatch) of names that are one or the other, whatever else is said.
        splits: pattern -> how many blocks of equal rows, or the rows of each.
        module: of the parameters, where it is known.

    Attributes:
        names: of parameters, as far as they are known.
    """

    def __init__(
        self, matrices: Sequence[str], others: Sequence[str], splits: Splits, module: nn.Module | None
    ) -> None:
        self.matrices = (matrices,) if isinstance(matrices, str) else tuple(matrices)
        self.others = (others,) if isinstance(others, str) else tuple(others)
        self.splits = dict(splits)
        self.names: dict[torch.Tensor, str] = {}
        self._tables: set[torch.Tensor] = set()
        self._convolutions: set[torch.Tensor] = set()
        if module is not None:
            self._look_at(module)

    def _look_at(self, module: nn.Module) -> None:
        self.names.update({p: name for name, p in module.named_parameters()})
        for m in module.modules():
            if isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
                self._tables.add(m.weight)
            elif isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d)):
                self._convolutions.add(m.weight)
            elif callable(head := getattr(m, "get_output_embeddings", None)):  # a model of transformers
                self._tables.update(getattr(head(), "parameters", tuple)())

    def learn(self, parameters: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]) -> None:
        """What these are called: as somebody says, or as it is known."""
        known = {p: self.name_of(p) for p in parameters}
        self.names.update({**{p: name for p, name in known.items() if name is not None}, **names})

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """As it was given, or as zerofx knows the parameter of a sharded module."""
        slot = getattr(parameter, "_slot", None)
        return self.names.get(parameter, None if slot is None else slot.name)

    def is_matrix(self, parameter: torch.Tensor) -> bool:
        """Whether Newton-Schulz is for ``parameter``.

        Raises:
            ValueError: it may be or not, for it has no name.
        """
        if parameter.ndim < 2:
            return False
        name = self.name_of(parameter)
        _, rows, columns = matrix_shape(parameter.shape, parameter in self._convolutions)
        one_row = min(rows, columns) < 2  # as a class token has it: there are no singular values to make alike
        if name is None:
            if one_row:
                return False
            raise ValueError(
                f"zerofx.Muon: a parameter of shape {tuple(parameter.shape)} without a name: expected to know whether "
                "it is an embedding's or the output's, which AdamW is for. Pass the module, "
                'module.named_parameters(), or groups that say it: {"params": matrices, "use_muon": True}.'
            )
        if _matches(name, self.others):
            return False
        if _matches(name, self.matrices):
            return True
        return not (one_row or parameter in self._tables or _is_table(name))

    def form_of(self, parameter: torch.Tensor) -> Form:
        """How ``parameter``, which is a matrix, is orthogonalized.

        Raises:
            ValueError: it cannot be split as `splits` says.
        """
        flat = parameter.ndim > 3 or parameter in self._convolutions
        name = self.name_of(parameter) or ""
        pattern = next((pattern for pattern in self.splits if fnmatch.fnmatchcase(name, pattern)), None)
        if pattern is None:
            return Form(flat)
        _, rows, _ = matrix_shape(parameter.shape, flat)
        given = self.splits[pattern]
        sizes = (rows // given,) * given if isinstance(given, int) and given > 0 else given
        if isinstance(sizes, int) or sum(sizes) != rows or min(sizes) < 1:
            raise ValueError(
                f"splits={{{pattern!r}: {given!r}}}: {name!r} has {rows} rows: expected a number of blocks that "
                "divides it, or the rows of each block, which add up to it."
            )
        return Form(flat, tuple(sizes))

    def check_used(self) -> None:
        """Every pattern has a parameter: one that is mistyped would change nothing.

        Raises:
            ValueError: one has none.
        """
        for option in ("matrices", "others", "splits"):
            for pattern in getattr(self, option):
                if not any(fnmatch.fnmatchcase(name, pattern) for name in self.names.values()):
                    some = ", ".join(map(repr, list(self.names.values())[:3]))
                    raise ValueError(
                        f"{option}={pattern!r} is the name of no parameter: expected a pattern (fnmatch) of names like "
                        f"{some or 'those of named_parameters()'}."
                    )


def ratio(rows: int, columns: int, adjust_lr_fn: str | None) -> float:
    """What ``lr`` is multiplied with for a matrix, as ``torch.optim.Muon`` does it.

    "original" (Jordan et al.) has the same spectral norm for tall matrices, "match_rms_adamw" (Liu et al. 2025,
    arXiv 2502.16982) the size of AdamW's updates, so that both take one ``lr``.
    """
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def named(group: Any) -> tuple[list[torch.Tensor], dict[torch.Tensor, str]]:
    """The tensors of a group as ``torch.optim`` takes it, and the names that come with them. None: it refuses these."""
    given = group["params"] if isinstance(group, dict) else ()
    if isinstance(group, dict) and not isinstance(given, (torch.Tensor, set)):
        given = group["params"] = list(given)  # it may be a generator
    pairs = [x if isinstance(x, tuple) else (None, x) for x in ([given] if isinstance(given, torch.Tensor) else given)]
    names = {p: name for name, p in pairs if name is not None}
    if isinstance(given, set) or not all(isinstance(p, torch.Tensor) for _, p in pairs):
        return [], {}
    return ([p for _, p in pairs], names) if len(names) in (0, len(pairs)) else ([], {})


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_table(name: str) -> bool:
    """Whether a parameter's name is that of an embedding's or an output's weight, or of an embedding itself."""
    *path, own = name.split(".")
    path = [part for part in path if part not in ("module", "_orig_mod")]  # DistributedDataParallel, torch.compile
    last = path[-1] if path else own
    if _matches(last, TABLES) or _matches(own, TABLES):
        return True
    return last in HEADS or (last in TOP_HEADS and len(path) == 1)
