"""Dense baselines, and the definition of each op itself."""
