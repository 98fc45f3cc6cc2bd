"""Campaigns: which suites are measured in which order, as YAML."""
