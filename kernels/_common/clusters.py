"""How many thread block clusters a device runs at a time."""

import ctypes
from functools import cache

import torch

from sparsebench.kernels._common.cuda import load
from sparsebench.kernels._common.driver import (
    CLUSTER_DIMENSION,
    LaunchAttribute,
    LaunchConfig,
    driver,
    require_success,
)


@cache
def clusters_at_once(ctas: int, threads: int, shared_bytes: int, device: torch.device) -> int:
    """Return how many clusters of such CTAs the device runs at a time (clusters.cu)."""
    kernel, _ = load("clusters", "nothing", (("CTAS", ctas),), shared_bytes, device)
    of_cluster = LaunchAttribute(CLUSTER_DIMENSION, 0, (ctas, 1, 1))
    shape = (ctas, 1, 1, threads, 1, 1, shared_bytes)
    config = LaunchConfig(*shape, None, ctypes.pointer(of_cluster), 1)
    clusters = ctypes.c_int()
    pointer, reference = ctypes.c_void_p(kernel.ptr), ctypes.byref(config)
    result = driver().cuOccupancyMaxActiveClusters(ctypes.byref(clusters), pointer, reference)
    require_success(result, f"clusters of {ctas} CTAs of {threads}")
    return clusters.value
