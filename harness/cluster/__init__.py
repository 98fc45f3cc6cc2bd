"""A plan on several GPUs: shared out in threads or in jobs of a cluster, and merged."""
