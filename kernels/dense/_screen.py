"""Screen many calls: keep the fastest of two samples with a cold L2 cache.

The stream is held while the host enqueues the calls (_common/gpu_clock.py), so no graph is needed;
capturing one would take longer than the call. The search then times the kept calls in graphs
(_common/search.py).
"""

from collections.abc import Callable, Sequence

import torch

from sparsebench.kernels._common.gpu_clock import GpuClock
from sparsebench.kernels._common.l2_flush import flusher

ROUNDS = 2


def screened(
    calls: Sequence[Callable[[], object]], limit: int, always: int, device: torch.device
) -> list[int]:
    """Return the indices of the first `always` calls and of the fastest others, `limit` in total.

    On a CPU, return all. Others that raise are dropped, even if fewer than `limit` remain.
    """
    if device.type != "cuda":
        return [*range(len(calls))]
    rest = [i for i in range(always, len(calls)) if _runs(calls[i])]
    torch.cuda.synchronize(device)  # an illegal access raises here
    if always + len(rest) <= limit:
        return [*range(always), *rest]
    flush, clock = flusher(device), GpuClock(device)
    pairs = [(calls[i], True) for i in rest]
    rounds = [clock.cold(pairs, flush) for _ in range(ROUNDS)]
    least = {
        i: min(sample.time_us for sample in samples)
        for i, samples in zip(rest, zip(*rounds, strict=True), strict=True)
    }
    best = sorted(rest, key=lambda i: least[i])[: limit - always]
    return [*range(always), *sorted(best)]


def _runs(call: Callable[[], object]) -> bool:
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return False
    return True
