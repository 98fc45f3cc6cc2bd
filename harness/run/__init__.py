"""A whole run: worker processes, the run directory, and what starts from a run that is there."""
