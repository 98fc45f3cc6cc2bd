"""A plan shared out over GPUs, jobs and machines, and campaigns of many suites."""
