"""Sparse kernels of other libraries, each at its best."""
