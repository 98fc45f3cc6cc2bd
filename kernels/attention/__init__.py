"""Kernels of block-sparse attention: each block of queries attends to a list of key blocks."""
