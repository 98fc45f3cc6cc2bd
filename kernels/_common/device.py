"""Sizes of a device that kernels and their models of time need."""

from typing import Any

import torch


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that torch can allocate on a GPU: free ones, and those of its cache."""
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached


def shared_bytes_of(device: torch.device) -> int:
    """Return the bytes of shared memory that a CTA may have."""
    properties: Any = torch.cuda.get_device_properties(device)  # the stub lacks it
    return int(properties.shared_memory_per_block_optin)
