"""The ranks of a host have one copy of the weights, in common memory (``one_copy=``).

==========  =========================
one_copy    the weights
feature     what is added to the core
==========  =========================
"""
