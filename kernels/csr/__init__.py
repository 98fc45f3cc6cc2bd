"""Kernels that multiply weights in compressed sparse rows (CSR)."""
