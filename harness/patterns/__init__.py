"""Patterns, one per file: which elements of a weight are kept."""
