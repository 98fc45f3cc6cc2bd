"""Which worker of bsr_wgmma.cu multiplies what: items of unequal lengths on 132 SMs.

    item    a group of slices (_wgmma_pairs.py) and the tokens that a worker multiplies at a time
    worker  a CTA, or a cluster of two with twice the tokens; there are as many as the GPU holds

Items are assigned longest first (_common/work_list.py). In a worker's list tokens ascend, so that X
is read from memory all along and not by the first wave: at 90 % of n = k = m = 4096 that one waits
8 us for X. An item is never split: a hub row that is longer than a worker's fair share is the limit
of balance.
"""

from dataclasses import dataclass

import numpy as np

from sparsebench.kernels._common.work_list import Ints, assigned, first_of
from sparsebench.kernels.bsr._wgmma_pairs import Groups, packed

READ_AHEAD = 2  # items past the end, which producers read and do not use
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


def schedule(groups: Groups, m: int, tokens: int, workers: int) -> Schedule:
    """Assign every group and tile of `tokens` of m tokens; no worker is left without an item."""
    steps = np.diff(groups.first)
    group, token, starts = assigned(steps + STORING, m, tokens, workers)
    items = np.zeros((len(group) + READ_AHEAD, 4), np.int32)
    items[: len(group)] = np.column_stack(
        [groups.first[group], steps[group], token, packed(groups.slices[group])]
    )
    return Schedule(items, starts.astype(np.int32))
