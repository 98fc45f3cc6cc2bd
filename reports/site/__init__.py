"""A static site of runs: a page per run, format, kernel and claim, downloads, badges and a feed."""
