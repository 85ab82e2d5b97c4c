"""The optimizer's step over shards."""
