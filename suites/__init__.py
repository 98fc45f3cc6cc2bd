"""Suites: what to run, as YAML."""
