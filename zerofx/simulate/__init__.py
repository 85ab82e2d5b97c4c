"""Simulate: graphs run on tensors without memory, and put on a clock. The compiler divides by it, `inspect` predicts.

=============  =================================================================
rehearsal      graphs are run on fake tensors, a whole step of them
recorder       what ran is noted
inductor_code  Inductor's code, made to run so
workspace      what kernels take inside of themselves
files          what is in a rank's file, and what the optimizer moves there
hosted         what the optimizer copies, whose state is on the host
clock          what was noted, by rates: seconds and live bytes
asked          what features are asked
price          what one division of `memory=` takes
=============  =================================================================

::

    workspace ◀── recorder ◀── inductor_code ◀── rehearsal ◀── price
                  recorder ◀── clock ──▶ files, hosted         price ──▶ clock
"""
