"""Capture a call as a CUDA graph, with no garbage collected meanwhile.

What Python frees during a capture may call CUDA (an older graph, a module, an event), and such a
call ends the capture. In a published run 3 of 2088 rows were timed without a graph for this reason.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: "torch.cuda.CUDAGraph", pool: Any = None) -> Iterator[None]:
    """Capture the work of the block, on the current device. Raises RuntimeError if it cannot be."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if enabled:
            gc.enable()
