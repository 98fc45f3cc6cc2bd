"""A whole model: what kernels of its MLP save in a forward pass, and in a training step."""
