"""Measure a whole model: how much the kernels of its MLPs save in inference and training."""
