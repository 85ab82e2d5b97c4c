"""Triton kernels and their CPU counterparts."""
