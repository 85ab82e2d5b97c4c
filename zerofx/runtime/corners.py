"""Corners: what serves one case, in a file or a folder that nothing else imports.

Each puts itself into the table of a seam as it is imported: a shortcut between ranks, a case of weights, a pass. Take
a line out here, delete the file or the folder, and everything else works as before.
"""

from __future__ import annotations

import importlib

CORNERS = (
    "zerofx.runtime.ranks.same_host",  # ranks of one host read each other's memory      passes/pairwise.py SHORTCUTS
    "zerofx.runtime.ranks.gloo_threads",  # gloo's threads on a core that computes      ranks/sharing.py SETTLED
    "zerofx.runtime.ranks.two_levels",  # meshes of two dimensions                      ranks/sharing.py SHARINGS
    "zerofx.runtime.state.row_copy",  # optimizer state divided between replicas        state/weights.py WEIGHTS
    "zerofx.runtime.state.part",  # weights divided over a whole mesh, in two hops      state/weights.py WEIGHTS
    "zerofx.runtime.state.one_copy",  # weights once for all ranks of a host            state/weights.py WEIGHTS
    "zerofx.runtime.state.in_file",  # the optimizer's state in a file                 state/home.py HOMES
    "zerofx.runtime.state.on_host",  # the optimizer's state in the host's memory      state/home.py HOMES
)


def furnish() -> None:
    """Import every corner."""
    for name in CORNERS:
        importlib.import_module(name)
