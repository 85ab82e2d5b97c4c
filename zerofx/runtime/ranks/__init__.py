"""Ranks that talk to each other outside of graphs."""
