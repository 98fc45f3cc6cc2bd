"""Kernels of weights with zeros anywhere: format bitmap."""
