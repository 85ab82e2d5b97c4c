"""The kinds of lines: `benchmarks.gpu.KINDS` has their order."""
