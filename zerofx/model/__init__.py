"""Facts about a model: no tensor of any rank, no process group.

============  ==================================================================
layout        where each parameter lies in its group's flat buffer
grouping      which parameters travel together
stack         the layers of a deep module that are alike
sharding      over which ranks of a mesh something is divided, by purpose
precision     which dtypes weights and gradients have
policies      which part of a module has which of these
ignored       which parameters stay as they are
rules         which modules an option is about, by class or by pattern of names
memory        how many bytes there are for all of a rank
wire          what travels in codes of fewer bits
offload       which state lives on a disk
bitsandbytes  what is known of it, which is never imported
hugging_face  what is known of transformers, which is never imported
units         bytes and seconds, as people read them
============  ==================================================================

Imports `zerofx._torch` and `zerofx.kernels`::

    _torch, kernels ◀── model ◀── passes, runtime, compiler, inspect
"""
