"""What happens to sharded tensors outside of graphs."""
