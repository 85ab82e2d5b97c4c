"""Optim: the optimizer's step over shards.

=============  ==================================================================
adamw          `zerofx.AdamW`
spans          flat runs of shards, instead of one parameter after another
loaded         state that was loaded becomes parts of these runs, or sharded as its parameter
through_file   state that passes through memory, chunk by chunk
through_host   state in the host's memory, which gradients and weights pass by
moments        moments in 32, 16 or 8 bits
squares        the norm of all gradients, as far as the host computes it
device_step    the step in Triton kernels
muon           `zerofx.Muon`
ema            `zerofx.EMA`
matrices       which parameters are matrices to it, and their blocks
orthogonalize  Newton-Schulz on plain tensors
owners         whole parameters, each on one rank
by_owner       an optimizer's own step on whole parameters, each on one rank
explained      how an optimizer steps, in words
probe          whether an optimizer works on slices, by owners, or not at all
step           `zerofx.step_in_backward`
moved          what an update moves through a file
beside         plain parameters that nobody averages, beside sharded ones
hooks          what every optimizer is asked before a step
=============  ==================================================================

Imports `zerofx.kernels`, `zerofx.runtime.eager` and what is below it::

    kernels, state ◀── spans ◀── moments, through_file, through_host ◀── loaded, device_step ◀── adamw ◀── step, muon
    spans ◀── squares ◀── adamw
    orthogonalize ◀── matrices ◀── muon
    owners, loaded ◀── by_owner, muon ◀── hooks ──▶ probe, loaded
    beside ◀── hooks ◀── step, explained
"""
