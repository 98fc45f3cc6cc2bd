"""Build models around the kernels: prune them, convert them, and let transformers run them."""
