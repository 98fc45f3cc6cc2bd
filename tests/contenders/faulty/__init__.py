"""Kernels that do not end well: each must cost its own row, and no other."""
