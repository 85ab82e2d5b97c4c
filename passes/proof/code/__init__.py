"""The code that Inductor wrote for a graph, read once before it runs: does it do what the graph says, in its order?

`verify` proves the graph. The code generator then orders, fuses and renames once more, by heuristics of its own. Two of
its errors were silent (docs/decisions/proof-of-the-code.md). So the wrapper's function ``call`` is read too, line by
line, with what each kernel reads and writes. The reader knows nothing of the passes, and of Inductor only the text. It
is a package of its own beside the graph's proof: it proves the same things of another text, and raises the same error.

===========  ============================================================================================
rule         what must hold
===========  ============================================================================================
wait         nothing touches or returns what a collective brings before the wait for it, and nothing on another stream
             touches it at all; each is waited for as often as in the graph, which is once
send         nothing writes to what a collective sends between its start and its wait
discard      nothing touches a gathered buffer whose name is deleted, nor is it written over while it can still be read;
             it is let go after its last use, before the next collective starts
order        collectives start in the order of the graph, each with what the graph gives it
copy         no weight is copied that a matrix product reads, but where the graph says so
step         a group is updated as often as in the graph, which is once; by its gradient; after its weights' readers
reread       backward reads no input that forward has written to since
reload       weights that live elsewhere come in the order of the graph, each start and each wait once and about what it
             is about there; nothing touches what is on its way
offload      a gradient leaves likewise, and nothing writes to it until it has left
activation   what forward saves leaves likewise, and comes back likewise in backward; its handle is saved
read         the code takes the graph's inputs; a line names what is there; no statement of an unknown kind names
             what a collective brings or sends
===========  ============================================================================================

===========  ==============================================================
file         what is in it
===========  ==============================================================
kernel.py    a kernel's text: what it reads, writes and copies
line.py      one line: what it does to memory
text.py      an expression: names, numbers, sizes
wrapper.py   the wrapper, walked line by line
promise.py   what the graph asks for
rules.py     the table above, but for
carried.py   the rules of what lives elsewhere
region.py    the rule of a region's code, which has none of that in it
===========  ==============================================================
"""

from __future__ import annotations

from zerofx.passes.proof.code.promise import Promise
from zerofx.passes.proof.code.region import check_region
from zerofx.passes.proof.code.rules import check_code

__all__ = ["Promise", "check_code", "check_region"]
