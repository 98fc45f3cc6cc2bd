"""A GPU that is not there, for tests and for planning."""
