"""Somebody else's format and kernel."""
