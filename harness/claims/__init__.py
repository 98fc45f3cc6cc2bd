"""Measure claims: plan, bound, run, screen and confirm their suites."""
