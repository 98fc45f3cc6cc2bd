"""Kernels for feed-forward layers with few active hidden units per token."""
