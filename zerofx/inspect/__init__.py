"""What can be read, and foretold, of a model and its graphs."""
