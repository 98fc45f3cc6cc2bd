"""Is pruning a model worth it? From measured layers, estimates and whole models."""
