"""Runs as a static site: a page a run, a format and a kernel, with downloads, feed and badges."""
