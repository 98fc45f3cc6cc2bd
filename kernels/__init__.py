"""Kernels, one a file: what multiplies a format."""
