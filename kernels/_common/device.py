"""Sizes of a device that kernels and their models of time need."""

from typing import Any

import torch


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_bytes_of(device: torch.device) -> int:
    """Return the bytes of shared memory that a CTA may have."""
    properties: Any = torch.cuda.get_device_properties(device)  # the stub lacks it
    return int(properties.shared_memory_per_block_optin)
