"""Time and memory, foretold."""
