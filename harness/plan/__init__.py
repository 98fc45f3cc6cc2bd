"""Read a suite file into the contests of a run."""
