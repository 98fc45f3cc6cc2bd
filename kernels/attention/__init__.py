"""Kernels of block-sparse attention: a mask says which blocks of keys a block of queries sees."""
