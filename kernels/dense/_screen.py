"""Screen many calls: keep the fastest of two samples with a cold L2 cache.

A library call takes about 10 µs of host time, less than the device needs for the flush before it.
So no graph is needed, whose capture would take longer than the call. The search then times the kept
calls in graphs (_common/search.py).
"""

from collections.abc import Callable, Sequence

import torch

from sparsebench.kernels._common.l2_flush import flusher

ROUNDS, AHEAD = 2, 20  # flushes that let the host run ahead, about 30 µs each


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
    flush, least = flusher(device), dict.fromkeys(rest, float("inf"))
    for _ in range(ROUNDS):
        marks = []
        for _ in range(AHEAD):
            flush()
        for i in rest:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush()
            begin.record()
            calls[i]()
            end.record()
            marks.append((i, begin, end))
        torch.cuda.synchronize(device)
        for i, begin, end in marks:
            least[i] = min(least[i], begin.elapsed_time(end))
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
