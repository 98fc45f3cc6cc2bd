"""A suite file to the contests of a run."""
