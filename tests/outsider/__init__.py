"""Compute the published figures again without importing the project (__main__.py)."""
