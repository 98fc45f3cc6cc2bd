"""Kernels: one per file, in a folder per family. A family multiplies what its format stores."""
