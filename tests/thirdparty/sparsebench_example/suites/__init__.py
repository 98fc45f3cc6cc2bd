"""Somebody else's suites."""
