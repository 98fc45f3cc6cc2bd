"""Decide for bsr_small.cu which block rows are multiplied together, and in which steps.

    row     a block row of W (a block column, for dX): 16 or 32 features of Y
    unit    32 features: a row of 32, or two of 16, so that Y is written in rows of 64 bytes
            (NOTES.md)
    group   the units of a work item: units that touch the same strips
    strip   32 columns of X, the depth of the products
    step    up to four strips, and all blocks of the group there; it fills one stage
    share   the blocks of a step in the rows of one warpgroup
    place   position of a block in the strips of a step: 0 to 7 for blocks of 16, 0 to 3 for 32

        strips     0   1   2   3   4        a step: strips 0, 1 and 3 (2 and 4 are not touched)
        row 0      #.  ..  ..  .#  ..         row 0: places 0 and 5
        row 1      ..  .#  ..  ##  ..         row 1: places 3, 4 and 5

A strip costs 64 bytes per token, however many rows use it, and these loads are the bottleneck. So a
group starts with the unit that has the most strips, and repeatedly adds the unit that needs the
fewest new ones. For uniform random blocks, n = k = 4096, groups of 256 features touch this part of
the strips (in brackets: groups in the order of W):

    blocks of 32    80 %: 0.72 (0.83)    90 %: 0.46 (0.57)    95 %: 0.24 (0.31)
    blocks of 16    90 %: 0.89 (0.96)    95 %: 0.70 (0.81)    98 %: 0.37 (0.48)
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsebench.formats._format import offsets_of, rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.declarations import record
from sparsebench.kernels._common.made_once import made_once
from sparsebench.kernels._common.work_list import Ints, Records, assigned, fill
from sparsebench.kernels.bsr._wgmma_lists import checked

STRIP, STRIPS = 32, 4  # columns of X in a strip; strips in a step
UNIT = 32  # features
ROOMS = 5, 12, 24  # KB of blocks in a step: 6, 5 or 4 stages with 32 KB of X
SHARE = 64 // 3  # blocks of a share at most: 3 bits each in 64
NO_STRIP = 0xFFFF
READ_AHEAD = 64  # steps past the end, which producers read but do not use
LAST, END = 1 << 8, 1 << 9  # flags of a step: the last of an item, of a worker

# The cost of a step (handing over a stage) and of an item (storing 256 x 128 of Y), in bytes that
# TMA loads in that time (67 B/ns per SM). Rough measurements.
HAND_OVER, STORING = 4_000, 40_000


@dataclass(frozen=True)
class StepLists:
    """The work of a CTA for each group, for any token.

    units   int32 [groups, features / 32]: numbers of units, or -1
    first   [groups + 1]: first step of each group; each has at least one, which may load nothing
    steps   Step [steps], without token and flags (strips.cuh)
    order   [blocks]: the stored block at each position of the packed W
    strips, blocks  [groups]: how many are loaded
    room    KB of blocks that a step holds at most
    """

    units: Ints
    first: Ints
    steps: Records
    order: Ints
    strips: Ints
    blocks: Ints
    room: int

    def costs(self, rows: int, block: int) -> Ints:
        """Return the cost of each group for a tile of `rows` of X, in bytes of loads."""
        loads = self.strips * (rows * STRIP * 2) + self.blocks * (2 * block * block)
        costs: Ints = loads + HAND_OVER * np.diff(self.first) + STORING
        return costs


@dataclass(frozen=True)
class StepLayout:
    """How a kernel holds the blocks of a step.

    rows         block rows of a group
    warpgroups   share the rows evenly
    unit         neighbouring block rows that stay together
    across       blocks side by side in a strip
    strips       in a step, at most
    block_bytes  of a block of W
    rooms        KB of blocks that a step may hold
    parity       a place is twice the strip's, plus 1 in an odd column
    groups       fewest groups; with just enough groups for all rows, the last round may be short
    """

    rows: int
    warpgroups: int
    unit: int
    across: int
    strips: int
    block_bytes: int
    rooms: tuple[int, ...]
    parity: bool = False
    groups: int = 0


@made_once
def lists_of(w: Bsr, features: int, warpgroups: int, transposed: bool = False) -> StepLists:
    """Unite the block rows of W [n, k], or of its transpose, `features` to a group.

    Raises FormatError.
    """
    block_rows, block_columns = checked(w)
    b, (n, k) = w.block[0], w.shape
    owner, depth = (block_columns, block_rows) if transposed else (block_rows, block_columns)
    width, deep = (k, n) if transposed else (n, k)
    layout = StepLayout(features // b, warpgroups, UNIT // b, STRIP // b, STRIPS, 2 * b * b, ROOMS)
    return listed(owner, depth, -(-width // UNIT), -(-deep // STRIP), layout)


def listed(owner: Ints, depth: Ints, units: int, strips: int, layout: StepLayout) -> StepLists:
    """Return the lists for blocks in rows `owner` and columns `depth`."""
    warpgroups, across, unit_rows = layout.warpgroups, layout.across, layout.unit
    height = layout.rows // warpgroups
    strip, half = np.divmod(depth, across)
    unit, within = np.divmod(owner, unit_rows)
    united = _united(unit, strip, units, strips, layout.rows // unit_rows, layout.groups)
    # Neighbours in a group share strips. Each goes to another warpgroup, so that none waits.
    united = united.reshape(len(united), -1, warpgroups).swapaxes(1, 2).reshape(len(united), -1)
    group, seat = np.empty((2, united.max() + 1), np.int64)
    group[united[united >= 0]], seat[united[united >= 0]] = np.nonzero(united >= 0)
    g, (share, row) = group[unit], np.divmod(seat[unit] * unit_rows + within, height)

    there = np.zeros((len(united), strips, warpgroups), np.int64)
    np.add.at(there, (g, strip, share), 1)
    room = _room(there.sum(2), layout)
    most = room * 1024 // layout.block_bytes
    number, slot, first = _steps(there, most, layout.strips)
    step, place = number[g, strip], slot[g, strip] * across + half
    if layout.parity:
        place = 2 * place + depth % 2

    order = np.lexsort((place, row, share, step))
    list_ = (step * warpgroups + share)[order]
    start = np.searchsorted(list_, np.arange(first[-1] * warpgroups + 1))
    nth = (np.arange(len(order)) - start[list_]).astype(np.uint64)
    counts, places = np.zeros((2, len(start) - 1), np.uint64)
    np.add.at(counts, list_, np.uint64(1) << (4 * row[order]).astype(np.uint64))
    np.add.at(places, list_, place[order].astype(np.uint64) << 3 * nth)
    loaded = np.full((first[-1], STRIPS), NO_STRIP, np.uint16)
    at = there.any(2)
    loaded[number[at], slot[at]] = np.nonzero(at)[1]

    chunk = start[::warpgroups]
    steps = np.zeros(first[-1], record("bsr_small", "Step", (("WARPGROUPS", warpgroups),)))
    groups = np.repeat(np.arange(len(united)), np.diff(first))
    strips_of_step = loaded.view(np.uint64)[:, 0]
    fill(steps, blocks=np.diff(chunk), group=groups, first=chunk[:-1], strips=strips_of_step)
    firsts = start[:-1] - chunk[:-1].repeat(warpgroups)
    shares = {"counts": counts, "first": firsts, "places": places}
    fill(steps["shares"], **{name: a.reshape(-1, warpgroups) for name, a in shares.items()})
    return StepLists(
        united.astype(np.int32), first, steps, order, at.sum(1), there.sum((1, 2)), room
    )


def work(lists: StepLists, costs: Ints, m: int, tokens: int, workers: int) -> tuple[Records, Ints]:
    """Return the steps, worker by worker, and the first step of each worker.

    costs  of the groups

    Step [steps + READ_AHEAD] and [workers + 1]. The steps cover every group and every tile of
    tokens.
    """
    group, token, starts = assigned(costs, m, tokens, workers)
    lengths = np.diff(lists.first)[group]
    ends = lengths.cumsum()
    index = np.arange(ends[-1]) + np.repeat(lists.first[group] - (ends - lengths), lengths)
    steps = np.zeros(len(index) + READ_AHEAD, lists.steps.dtype)
    steps[: len(index)] = lists.steps[index]
    fill(steps, token=np.repeat(token, lengths))
    bounds = np.concatenate([[0], ends])[starts]
    flags = steps["shares"]["first"]
    flags[ends - 1] |= LAST
    flags[bounds[1:] - 1] |= END
    return steps, bounds


def cut(w: Bsr, side: int, depth: int | None = None) -> Bsr:
    """Return the matrix in blocks of `side` rows, a divisor of r, and `depth` columns, one of c.

    Blocks are square unless `depth` is given. The part of an edge block outside W is dropped.
    """
    (r, c), (n, k), depth = w.block, w.shape, depth or side
    down, across = r // side, c // depth
    row, column = rows_of(w.offsets)[:, None, None] * down, w.columns[:, None, None] * across
    row = (row + torch.arange(down, device=row.device)[:, None]).expand(-1, -1, across)
    column = (column + torch.arange(across, device=row.device)).expand(-1, down, -1)
    values = w.values.view(-1, down, side, across, depth).transpose(2, 3)
    rows, columns = -(-n // side), -(-k // depth)
    inside = (row < rows) & (column < columns)
    place, order = (row * columns + column)[inside].sort()
    return Bsr(
        shape=w.shape,
        offsets=offsets_of(place // columns, rows),
        columns=(place % columns).to(torch.int32),
        values=values[inside][order],
    )


def swizzle(block: int) -> Ints:
    """Return the order in which TMA would write the 16-byte pieces of a block [block, block]."""
    row, piece = np.ogrid[:block, : block // 8]
    pieces: Ints = row * (block // 8) + (piece ^ row // (64 // block) % (block // 8))
    return pieces.reshape(-1)


def sources(order: Tensor, pieces: Tensor) -> Tensor:
    """Return the position in the values of each 16-byte piece of the packed W: int32.

    Blocks are in the order of the steps, and the pieces of a block in the order of `swizzle`.
    """
    return (order[:, None] * len(pieces) + pieces).flatten().int()


def _united(unit: Ints, strip: Ints, units: int, strips: int, size: int, groups: int) -> Ints:
    """Group the units by the strips that they share: [groups, size], filled up with -1.

    A group has at most `size` units, and sizes differ by at most one. It starts with the unit that
    has the most strips, and repeatedly adds the unit that needs the fewest new ones.
    """
    groups = max(groups, -(-units // size))
    touched = np.zeros((units, strips), np.float32)
    touched[unit, strip] = 1
    seated, counts = np.zeros(units, np.float32), touched.sum(1)  # infinite for members
    members = np.full((groups, size), -1)
    for g in range(groups):
        new, best = np.ones(strips, np.float32), int((counts - seated).argmax())
        for seat in range(units * (g + 1) // groups - units * g // groups):
            members[g, seat], seated[best] = best, np.inf
            new[touched[best] > 0] = 0
            best = int((touched @ new + seated).argmin())
    return members


def _room(there: Ints, layout: StepLayout) -> int:
    """Return the smallest room that holds the blocks of any strip and of 1.25 mean steps.

    `there` counts blocks by group and strip.
    """
    mean = there.sum() / max(np.count_nonzero(there), 1) * layout.strips
    needed = max(int(there.max()), 1.25 * mean) * layout.block_bytes / 1024
    return next((room for room in layout.rooms if room >= needed), layout.rooms[-1])


def _steps(there: Ints, most: int, strips: int) -> tuple[Ints, Ints, Ints]:
    """Put strips into steps, in ascending order: at most `strips` and `most` blocks in each.

    `there` counts blocks by group, strip and warpgroup. Returns [groups, strips] the step of each
    strip, [groups, strips] its position in the step, and [groups + 1] the first step of each group.
    """
    number, slot = np.zeros((2, *there.shape[:2]), np.int64)
    first, total = [0], 0
    for g, counts in enumerate(there):
        used, held = strips, np.zeros_like(counts[0])
        for strip in np.flatnonzero(counts.any(1)).tolist():
            more = held + counts[strip]
            if used == strips or more.sum() > most or more.max() > SHARE:
                used, more, total = 0, counts[strip], total + 1
            number[g, strip], slot[g, strip] = total - 1, used
            used, held = used + 1, more
        total = max(total, first[-1] + 1)
        first.append(total)
    return number, slot, np.array(first)
