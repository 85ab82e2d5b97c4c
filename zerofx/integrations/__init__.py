"""Integrations: zerofx under the trainers that others wrote. Import the file of the one you use.

============  ==================================================================
accelerate    ``Accelerator`` of Hugging Face's accelerate
transformers  ``Trainer`` and ``Seq2SeqTrainer`` of transformers
lightning     strategies for Lightning's ``Fabric`` and ``Trainer``
peft          adapters, saved whole on rank 0
fsdp          FSDP2's ``fully_shard``
states        optimizers' states, whole and sharded, for all of them
============  ==================================================================

A file imports its package when it is imported itself, and nothing else of zerofx imports a file of this one. Each uses
what its package has for that, a subclass or a hook; nothing of a package is replaced. docs/integrations.md says what
works, and what does not.

Imports every package but `zerofx.inspect`::

    states ◀── peft ◀── accelerate ◀── transformers
           ◀── fsdp
           ◀── lightning
"""
