"""Patterns: which elements of a weight are kept, one pattern a file."""
