"""README.md and docs/ as programs: their ``python`` blocks, and what these blocks find when they run.

A block runs by itself on every rank. A comment in front of it, which no page shows, says otherwise:

=================================  =====================================================================
``<!-- given: compiled -->``       `model` is compiled already, and has made a step with `optimizer`
``<!-- goes on -->``               the block finds what the block before it has left
``<!-- fragment: why -->``         it does not run, for this reason
=================================  =====================================================================

The executor is the eager one: generated code is the business of other tests.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zerofx
from zerofx.compiler.options import Options

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "tests/README.md"]
_BLOCK = re.compile(r"(?:^<!-- (?P<said>.*?) -->\n)?^```python\n(?P<code>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A ``python`` block.

    Attributes:
        page, line: where its code begins, as an editor counts.
        code: its text.
        said: the comment in front of it, or "".
    """

    page: Path
    line: int
    code: str
    said: str

    @property
    def fragment(self) -> bool:
        return self.said.startswith("fragment: ")

    @property
    def goes_on(self) -> bool:
        return self.said == "goes on"

    def run(self, names: dict[str, Any]) -> None:
        """Execute it among ``names``; a prompt's answers are compared."""
        if self.code.lstrip().startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(self.code, names, self.page.name, str(self.page), self.line - 1)
            said = io.StringIO()
            doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.write, clear_globs=False)
            assert not said.getvalue(), said.getvalue()
        else:
            # Blank lines in front, so that a traceback names the line of the page.
            exec(compile("\n" * (self.line - 1) + self.code, str(self.page), "exec"), names)


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text[: found.start("code")].count("\n") + 1, found["code"], found["said"] or "")
        for found in _BLOCK.finditer(text)
    ]


class Net(nn.Module):
    """A model with the names that the pages use. With targets it returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.norm = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 64, bias=False)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = hidden + F.relu(block(hidden))
        return self.norm(hidden)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.lm_head(self.encode(x))
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())


def given(compiled: bool) -> dict[str, Any]:
    """The names that a block finds."""
    torch.manual_seed(dist.get_rank())
    model = Net()
    x, y = torch.randint(64, (2, 2, 8))
    names: dict[str, Any] = {
        "__name__": "page",
        "F": F,
        "Net": Net,
        "batch": (x, y),
        "dist": dist,
        "loader": [(x, y), (y, x)],
        "loss_of": lambda model, batch: model(*batch),
        "math": math,
        "micro_batches": [(x, y), (y, x), (x, y)],
        "model": model,
        "nn": nn,
        "rates": zerofx.Rates(1e10, 1e10, 1e9, 1e-4),
        "rank": dist.get_rank(),
        "step": 1000,
        "targets": y,
        "tokens": x,
        "torch": torch,
        "x": x,
        "y": y,
        "zerofx": zerofx,
    }
    if compiled:
        zerofx.compile(model, stage=3)
        names["optimizer"] = optimizer = zerofx.AdamW(model.parameters(), lr=1e-3)
        names["scheduler"] = torch.optim.lr_scheduler.ConstantLR(optimizer)
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return names


def run_page(page: Path, folder: str) -> int:
    """On a rank: run the blocks of ``page`` in ``folder``; how many ran."""
    ran = 0
    names: dict[str, Any] = {}
    with _eager(), _inside(folder), contextlib.redirect_stdout(io.StringIO()):
        for block in blocks(page):
            if block.fragment:
                continue
            if not block.goes_on:
                torch.compiler.reset()
                names = given(block.said == "given: compiled")
            block.run(names)
            ran += 1
    return ran


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    """`contextlib.chdir`, which Python 3.10 has not got."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """``zerofx.compile`` takes the eager executor where none is chosen, and has a group for each layer of `Net`."""
    chosen = {"executor": "eager", "groups": zerofx.Grouping(min_bytes=1)}
    of = Options.of
    Options.of = staticmethod(lambda options: of(chosen | options))  # type: ignore[method-assign]
    try:
        yield
    finally:
        Options.of = staticmethod(of)  # type: ignore[method-assign]
