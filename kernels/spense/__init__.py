"""Kernels for weights of which one part is 2:4 sparse and the rest is dense (formats/spense.py)."""
