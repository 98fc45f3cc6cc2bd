"""Somebody else's format, kernels, op, pattern, figure and suite."""
