"""Of what all tensor-parallel ranks have alike, each saves a part (``partition_activations=``).

================  ====================================================================
same_values       which values all ranks of a process group have alike
partition_saved   the pass
alike             what ranks have alike of a graph: they compare
proof             what `verify` knows of parts
facts             what is known of a graph, and what its forward leaves for its backward
simulated         what a simulated step has to know
feature           what is added to the core
================  ====================================================================
"""
