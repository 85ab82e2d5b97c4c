"""Predict: time and memory, foretold.

=============  =================================================================
plan           what training would cost, by formulas: no process group, no graph
cost           those formulas
schemes        each scheme of a mesh of two dimensions: bytes by link, and seconds
speed          seconds of a plan: links and floating-point operations
wires          codes on the wire in a plan: bytes, and seconds to write and read them
flops          floating-point operations per token
shapes         well-known models on the meta device
predict        what the compiled graphs will take
rehearsal      they are run on fake tensors
recorder       what ran is noted
inductor_code  Inductor's code, made to run so
price          what one division of `memory=` would take
files          what is in a rank's file, and what the optimizer moves there
workspace      what kernels take inside of themselves
calibrate      the rates of this machine and network
disk           that of a disk
dry_run        graphs for any number of ranks, on one machine
=============  =================================================================

Imports every room below `zerofx.inspect`::

    recorder ◀── inductor_code ◀── rehearsal ◀── predict ◀── calibrate, price
    files ◀── predict
    disk ◀── calibrate
    flops ◀── speed ◀── schemes ──▶ cost ◀── wires ◀── plan ──▶ schemes
"""
