"""Predict: time and memory, ahead of a run.

=========  =================================================================
plan       what training would cost, by formulas: no process group, no graph
run        a stage of it
cost       those formulas
schemes    each scheme of a mesh of two dimensions: bytes by link, and seconds
speed      seconds of a plan: links and floating-point operations
wires      codes on the wire in a plan: bytes, and seconds to write and read them
flops      floating-point operations per token
shapes     well-known models on the meta device
decoders   those that are made here: Llama's family and GPT-2
predict    what the compiled graphs will take, by `zerofx.simulate`
calibrate  the rates of this machine and network
disk       that of a disk
kept       a file of them
dry_run    graphs for any number of ranks, on one machine
=========  =================================================================

::

    disk ◀── calibrate ──▶ kept
    plan ──▶ run ──▶ schemes ──▶ speed ──▶ flops
                     schemes ──▶ wires ──▶ cost
"""
