"""Kernels whose error the format's bound allows in bf16, and the usual error does not."""
