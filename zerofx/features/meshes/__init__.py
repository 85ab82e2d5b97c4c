"""Groups of ranks that are not all ranks: shards within hosts, replicas between them (``mesh=``, ``sharding=``).

================  ======================================================================
replicate         pass: reduced gradients are summed over the replicas
two_hop_gather    pass: a shard crosses between hosts once, then a host gathers
secondary_shard   pass: forward leaves a second shard, from which backward gathers
proof             what `verify` knows of them
two_levels        who shares a module on a mesh of two dimensions
row_copy          weights: optimizer state that replicas of a module share
part              weights that are divided over all of a mesh, and gathered in two hops
facts             what is known of a graph
simulated         what a simulated step has to know
feature           what is added to the core
================  ======================================================================
"""
