"""Of tables that are only looked up, rows travel (``lookups=True``).

============  ==================================================================
lookup        the pass
operators     its two operators
proof         what `verify` knows of rows
feature       what is added to the core
============  ==================================================================
"""
