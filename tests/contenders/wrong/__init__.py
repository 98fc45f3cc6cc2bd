"""Kernels that are wrong, each in its own way: every one of them must be rejected."""
