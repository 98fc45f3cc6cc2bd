"""What came back: records, runs on disk, and what is computed from them."""
