"""Claims measured: their suites planned, bounded, run, screened and confirmed."""
