"""Run one contest in one process: operands, contenders, checks, timing, ceilings, energy."""
