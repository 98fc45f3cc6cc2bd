"""Kernels that call the code of other authors, built from a checkout that the user names."""
