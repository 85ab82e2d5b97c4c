"""The thread that reads and writes files for graphs: weights, gradients and activations, in the order of asking."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

_pool: ThreadPoolExecutor | None = None


def transfers() -> ThreadPoolExecutor:
    """That thread, of this process; it starts when it is first asked."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(1, thread_name_prefix="zerofx files")
    return _pool
