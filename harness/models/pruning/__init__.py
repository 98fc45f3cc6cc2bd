"""Pruning to the 2:4 hybrid, most of a weight 2:4 and the rest dense; whole models made sparse."""
