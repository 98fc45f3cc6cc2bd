"""Dense baselines, and the definition itself."""
