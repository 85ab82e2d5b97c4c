"""Of tables that are only looked up, rows travel (``lookups=True``).

============  ==================================================================
lookup        the pass
operators     its two operators
proof         what `verify` knows of rows
facts         what is known of a graph
feature       what is added to the core
============  ==================================================================
"""
