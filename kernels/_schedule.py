"""Which worker of bsr_wgmma.cu multiplies what: items of unequal lengths on 132 SMs.

    item    a group of slices (_wgmma.py) and the tokens that a worker multiplies at a time
    worker  a CTA, or a cluster of two with twice the tokens; there are as many as the GPU holds

        worker 0   |== group 3, token 0 ==|=== group 0, token 512 ===|= 7, 768 =|
        worker 1   |==== group 0, token 0 ====|== group 3, token 256 ==|= 5, 768 =|

Items are given away longest first, each to the worker with the least to do (Graham 1969: at most
4/3 of the best possible; for uniform random blocks 4 % above the mean). In a worker's list tokens
ascend, so that X is read from memory all along and not by the first wave: at 90 % of n = k = m =
4096 that one waits 8 us for X. An item is never split: a hub row that is longer than a worker's
fair share is the limit of balance.
"""

from dataclasses import dataclass
from heapq import heapreplace

import numpy as np

from sparsebench.kernels._wgmma import Groups, Ints, packed

READ_AHEAD = 2  # items past the end, which producers read and do not use
WORKERS = 160  # at most, and one more start
STORING = 3  # what it costs to store an item, in steps


@dataclass(frozen=True)
class Schedule:
    """What each worker does.

    items   int32 [items + READ_AHEAD, 4]: first step, how many, first token, the two slices (16
            bits each)
    starts  int32 [workers + 1]: where each worker's items start
    """

    items: Ints
    starts: Ints

    @property
    def first(self) -> bytes:
        """Return the kernel's argument First."""
        return first_of(self.items, self.starts)


def first_of(items: Ints, starts: Ints) -> bytes:
    """Return a kernel's argument First: the first item [4] of each worker, and `starts`."""
    firsts, padded = np.zeros((WORKERS, 4), np.int32), np.zeros(WORKERS, np.int32)
    firsts[: len(starts) - 1] = items[starts[:-1]]
    padded[: len(starts)] = starts
    return firsts.tobytes() + padded.tobytes()


def schedule(groups: Groups, m: int, tokens: int, workers: int) -> Schedule:
    """Assign every group and tile of `tokens` of m tokens; no worker is left without an item."""
    steps = np.diff(groups.first)
    group, token, starts = assigned(steps + STORING, m, tokens, workers)
    items = np.zeros((len(group) + READ_AHEAD, 4), np.int32)
    items[: len(group)] = np.column_stack(
        [groups.first[group], steps[group], token, packed(groups.slices[group])]
    )
    return Schedule(items, starts.astype(np.int32))


def assigned(costs: Ints, m: int, tokens: int, workers: int) -> tuple[Ints, Ints, Ints]:
    """Return group and first token of every item, by worker, and where each worker's start.

    An item is a group and a tile of `tokens` of m tokens, and costs what its group does.
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
