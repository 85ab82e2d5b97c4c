"""Weights and gradients travel quantized (``wire=``).

================  ============================================================================
operators         buffers in codes: operators, and a gather outside of graphs
error_feedback    operator: what quantizing cut off of a gradient is added to the next
quantize          the pass
quantized         weights that travel quantized outside of graphs
proof             what `verify` knows of codes
facts             what is known of a graph
simulated         what a simulated step has to know
feature           what is added to the core
================  ============================================================================
"""
