"""What came back: records, runs on disk, pandas frames."""
