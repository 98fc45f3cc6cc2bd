"""Kernels of feed-forward layers with few hidden units on for a token."""
