"""Measure a whole run: worker processes, the run directory, and commands that start from a run."""
