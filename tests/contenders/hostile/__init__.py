"""Kernels that attack the contest: each must end as `wrong` or `failed`, and cost nobody else."""
