"""Sparse kernels of other libraries, each with its fastest settings."""
