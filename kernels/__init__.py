"""Kernels: the optimizer's arithmetic, and numbers in codes, in Triton and for CPUs.

============  ==================================================================
adamw         AdamW over flat runs
norm          sums of squares, and what clipping makes of them
runs          where flat runs lie: a table of addresses
segments      flat runs as the kernels see them: tiles of parameters
blockwise     moments as 8-bit codes with a scale per block
split         a float32 as a bfloat16 and the rest
cpu           the step in PyTorch, for CPUs
code          what a code on the wire is, and where it lies
wire          numbers as codes on the wire, on any device
quantize      those codes in Triton
checksum      checksums at the speed of memory
device        which devices run Triton
============  ==================================================================

Imports nothing of zerofx.
"""
