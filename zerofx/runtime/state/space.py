"""Places in a file for what comes and goes in sizes of its own: activations, whose batches differ.

::

    give(8, 4)    [ 8..12 )             free neighbours become one
    give(12, 2)   [ 8..14 )
    take(3)       8, and [ 11..14 )     the smallest that is large enough
"""

from __future__ import annotations


class Space:
    """What is free of a file, as far as it was given."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # by where it begins
        self._begins: dict[int, int] = {}  # by where it ends

    def give(self, at: int, nbytes: int) -> None:
        """``nbytes`` from ``at`` on are free."""
        if (before := self._begins.pop(at, None)) is not None:
            nbytes += self._sizes.pop(before)
            at = before
        if (behind := self._sizes.pop(at + nbytes, None)) is not None:
            nbytes += behind
        self._sizes[at] = nbytes
        self._begins[at + nbytes] = at

    def take(self, nbytes: int) -> int | None:
        """Where ``nbytes`` are no longer free; None: nowhere are so many."""
        fits = [(size, at) for at, size in self._sizes.items() if size >= nbytes]
        if not fits:
            return None
        size, at = min(fits)
        del self._sizes[at], self._begins[at + size]
        if size > nbytes:
            self.give(at + nbytes, size - nbytes)
        return at
