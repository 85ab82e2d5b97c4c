"""Groups of ranks that are not all ranks: shards within hosts, replicas between them (``mesh=``, ``sharding=``).

================  ======================================================================
replicate         pass: reduced gradients are summed over the replicas
two_hop_gather    pass: a shard crosses between hosts once, then a host gathers
secondary_shard   pass: forward leaves a second shard, from which backward gathers
proof             what `verify` knows of them
feature           what is added to the core
================  ======================================================================
"""
