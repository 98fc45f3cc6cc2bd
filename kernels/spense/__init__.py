"""Kernels that multiply weights of 2:4 beside a dense region (Spense)."""
