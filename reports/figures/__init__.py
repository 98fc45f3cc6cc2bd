"""Report figures, one a file."""
