"""Pruning to the 2:4 hybrid: most of a weight 2:4 sparse, the rest, at its end, left dense."""
