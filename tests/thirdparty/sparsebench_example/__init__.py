"""Somebody else's format, kernel, pattern, figure and suite."""
