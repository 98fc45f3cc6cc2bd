"""A run on disk: its files, their seal, where they come from, and whether they are complete."""
