"""Scratch memory that launches on one stream share: partial sums, and counters that stay zero.

    outside of captures   one lasting piece of each kind per stream, whose launches do not overlap
    in a captured graph   partial sums from the graph's own memory; counters from an arena that was
                          zeroed before, one row per graph and stream, until the graph is deleted

So no call allocates or zeroes memory. Each kernel sets its counters back to zero.
"""

from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sparsebench.kernels._common.capture import captured_into, is_capturing, keep, make_lasting

SLOTS, COUNTERS = 256, 2048  # graphs and streams at a time; int32 of each: 2 MB


@dataclass(eq=False)
class _Arena:
    """The counters of a device, int32 [SLOTS, COUNTERS], and the rows that nothing uses."""

    zeros: Tensor
    unused: list[int] = field(default_factory=lambda: [*range(SLOTS)])
    of_streams: "dict[int, _Slot]" = field(default_factory=dict)
    of_graphs: "WeakValueDictionary[tuple[int, int], _Slot]" = field(
        default_factory=WeakValueDictionary
    )

    def row(self, stream: int, graph: int | None) -> Tensor | None:
        """Return the counters of a stream, or of a stream in a graph; None if all are used."""
        slot = self.of_streams.get(stream) if graph is None else self.of_graphs.get((graph, stream))
        if slot is None:
            if not self.unused:
                return None
            # The row unused for the longest time, because a deleted graph may still run.
            slot = _Slot(self.unused, self.unused.pop(0))
            if graph is None:
                self.of_streams[stream] = slot
            else:
                keep(slot)
                self.of_graphs[graph, stream] = slot
        return self.zeros[slot.number]


@dataclass(eq=False)
class _Slot:
    """The number of a row, which is unused again when the graph that keeps this is deleted."""

    unused: list[int]
    number: int

    def __del__(self) -> None:
        self.unused.append(self.number)


_ARENAS: dict[int, _Arena] = {}
_WORKSPACES: dict[tuple[int, int], Tensor] = {}


def workspace(x: Tensor, count: int) -> Tensor | None:
    """Return at least `count` floats for launches on the current stream; None for none."""
    if not count:
        return None
    if is_capturing(x):
        return x.new_empty(count, dtype=torch.float32)
    place = x.device.index, _stream(x)
    made = _WORKSPACES.get(place)
    if made is None or made.shape[0] < count:
        new = partial(torch.empty, count, dtype=torch.float32, device=x.device)
        made = _WORKSPACES[place] = make_lasting(new, x.device)
    return made


def counters(x: Tensor, count: int) -> Tensor | None:
    """Return at least `count` int32 that are zero between launches on the current stream."""
    if not count:
        return None
    graph = captured_into() if is_capturing(x) else None
    arena = _ARENAS.get(x.device.index)
    if arena is None and graph is None:
        new = partial(torch.zeros, SLOTS, COUNTERS, dtype=torch.int32, device=x.device)
        zeros = make_lasting(new, x.device)
        torch.cuda.synchronize(x.device)  # other streams may use it from now on
        arena = _ARENAS[x.device.index] = _Arena(zeros)
    row = None
    if arena is not None and count <= COUNTERS:
        row = arena.row(_stream(x), graph[0] if graph else None)
    return x.new_zeros(count, dtype=torch.int32) if row is None else row


def _stream(x: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(x.device.index)
