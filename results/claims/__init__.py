"""Claims that others published, and verdicts on them from rows: no GPU is needed."""
