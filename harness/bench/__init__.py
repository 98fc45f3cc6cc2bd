"""One contest in one process: operands, contenders, check, timing, ceilings, energy."""
