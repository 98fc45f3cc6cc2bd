"""Build and measure models around the kernels: prune them, train them, and time whole ones."""
