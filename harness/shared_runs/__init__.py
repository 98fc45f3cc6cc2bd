"""Share a plan out over GPUs, jobs and machines, and measure campaigns of many suites."""
