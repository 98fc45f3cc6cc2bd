"""Kernels that multiply block-sparse weights (BSR)."""
