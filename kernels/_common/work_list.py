"""The work list of a persistent kernel: the work items of each worker, in order.

    item    a group of rows of W and a tile of tokens
    worker  a CTA, or a cluster of two; the GPU runs all workers at a time

        worker 0   |== group 3, token 0 ==|=== group 0, token 512 ===|= 7, 768 =|
        worker 1   |==== group 0, token 0 ====|== group 3, token 256 ==|= 5, 768 =|

Items are assigned longest first, each to the least loaded worker. The last worker then ends at most
4/3 as late as in the best assignment (Graham 1969); with uniform random blocks, 4 % after the mean.
"""

from heapq import heapreplace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORKERS = 160  # size of the lists in kernel arguments (-DWORKERS): at most 159 workers

Ints = NDArray[np.integer[Any]]
Records = NDArray[np.void]
"""Records that a kernel declares (declarations.py)."""


def fill(records: Records, **fields: Ints) -> None:
    """Write the fields of the first records; the others stay zero."""
    for name, values in fields.items():
        records[name][: len(values)] = values


def uploaded(records: Records | Ints, device: torch.device) -> Tensor:
    """Return a copy of the bytes of a list on a device, which the host does not wait for."""
    host = torch.from_numpy(records.view(np.uint8))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def first_of(items: Records, starts: Ints) -> tuple[bytes, bytes]:
    """Return the fields of struct First: the first item of each worker, and `starts`."""
    firsts = np.zeros(WORKERS, items.dtype)
    firsts[: len(starts) - 1] = items[starts[:-1]]
    return firsts.tobytes(), starts_of(starts)


def starts_of(starts: Ints) -> bytes:
    """Return the first item, step or piece of each worker, as kernels take it."""
    padded = np.zeros(WORKERS, np.int32)
    padded[: len(starts)] = starts
    return padded.tobytes()


def assigned(costs: Ints, m: int, tokens: int, workers: int) -> tuple[Ints, Ints, Ints]:
    """Return group [items] and first token [items], worker by worker, and starts [workers + 1].

    An item is a group and a tile of `tokens` of the m tokens; its cost is that of the group.
    """
    tiles = -(-m // tokens)
    longest_first = np.argsort(-costs, kind="stable").repeat(tiles)
    loads = [(0, worker) for worker in range(min(workers, len(longest_first)))]
    owners = []
    for cost in costs[longest_first].tolist():
        load, worker = loads[0]
        owners.append(worker)
        heapreplace(loads, (load + cost, worker))
    owner, token = np.array(owners), np.tile(np.arange(tiles) * tokens, len(costs))
    listed = np.lexsort((token, owner))
    starts = np.searchsorted(owner[listed], np.arange(len(loads) + 1))
    return longest_first[listed], token[listed], starts
