"""Kernels, one a file, in a folder a family: what multiplies a format."""
