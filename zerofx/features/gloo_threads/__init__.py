"""Gloo's threads share a core with what computes.

==============  ===========================
gloo_threads    what is asked of the kernel
feature         what is added to the core
==============  ===========================
"""
