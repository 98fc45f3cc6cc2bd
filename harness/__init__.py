"""Runs contests: operands, contenders, correctness, timing, workers."""
