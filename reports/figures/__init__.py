"""The figures of a report, one per file."""
