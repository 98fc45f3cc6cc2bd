"""Kernels that attack the contest by means that a GPU has: streams, graphs, events."""
