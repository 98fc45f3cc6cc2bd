"""Assign the work of bsr_wgmma.cu to workers: items of unequal lengths on 132 SMs.

    item    a group of slices (_wgmma_pairs.py) and a tile of tokens
    worker  a CTA, or a cluster of two with twice the tokens; as many as the GPU holds

Items are assigned longest first (_common/work_list.py). In a worker's list, tokens ascend, so that
X is read from memory during the whole launch. If all workers started with different tokens, the
first items would wait 8 us for X (90 % sparsity, n = k = m = 4096). An item is never split, so a
row that is longer than a worker's fair share limits the balance.
"""

from dataclasses import dataclass

import numpy as np

from sparsebench.kernels._common.work_list import Ints, assigned, first_of
from sparsebench.kernels.bsr._wgmma_pairs import Groups, packed

READ_AHEAD = 2  # items past the end, which producers read but do not use
STORING = 3  # steps that take as long as storing an item


@dataclass(frozen=True)
class WgmmaSchedule:
    """The work of each worker.

    items   int32 [items + READ_AHEAD, 4]: struct Item. First step, number of steps, first token,
            two slices of 16 bits
    starts  int32 [workers + 1]: first item of each worker
    """

    items: Ints
    starts: Ints

    @property
    def first(self) -> bytes:
        """Return the bytes of struct First, a kernel argument."""
        return first_of(self.items, self.starts)


def schedule(groups: Groups, m: int, tokens: int, workers: int) -> WgmmaSchedule:
    """Assign every group and tile of `tokens` of m tokens; every worker gets an item."""
    steps = np.diff(groups.first)
    group, token, starts = assigned(steps + STORING, m, tokens, workers)
    items = np.zeros((len(group) + READ_AHEAD, 4), np.int32)
    items[: len(group)] = np.column_stack(
        [groups.first[group], steps[group], token, packed(groups.slices[group])]
    )
    return WgmmaSchedule(items, starts.astype(np.int32))
