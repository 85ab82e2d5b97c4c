"""Weights and gradients travel quantized (``wire=``).

================  ============================================================================
operators         buffers in codes: operators, and a gather outside of graphs
error_feedback    operator: what quantizing cut off of a gradient is added to the next
quantize          the pass
proof             what `verify` knows of codes
feature           what is added to the core
================  ============================================================================
"""
