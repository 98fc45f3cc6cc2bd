"""A simulated GPU, for tests and for planning."""
