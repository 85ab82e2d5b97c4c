"""Choose: one call that decides how a model is trained.

============  ==================================================================
choose        the call
alternatives  what there is to choose from, and what each would take
choice        what was chosen, on one screen
deep          what a deep module takes, from two shallow ones
nearest       what would fit where nothing does
alike         the same on every rank: `zerofx.compile` with ``batch=``
============  ==================================================================

::

    alike ──▶ choose ──▶ nearest ──▶ alternatives ──▶ deep, choice
"""
