"""What `zerofx.passes.verify` is made of: the walk, what it knows of each node, and the rules."""
