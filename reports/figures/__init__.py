"""Report figures, one per file."""
