"""What a rank holds."""
