"""From a module to graphs that run."""
