"""Divide the non-zeros of W among the warps of csr_cuda.cu, in the order in which they are read.

    group    neighbouring rows of W, for one CTA. All groups cost about the same
    piece    a row, or one of several equal parts of a row that is too long
    chunk    neighbouring columns of W, those of a panel of X in shared memory
    segment  a piece in a chunk: pairs of non-zeros; a zero fills an odd pair
    team     as many segments of about equal length as a warp has ways; zeros fill shorter ones.
             Teams are dealt longest first, each to the least loaded warp of the CTA
    step     a pair of each segment of a team

                 way 0    way 1    way 2    way 3
        step 0   piece 7  piece 3  piece 0  piece 4    the steps of a warp lie one after the other,
        step 1     ..       ..       ..       ..       and so do those of the CTA's warps

Each piece has its own sums. At the end the CTA adds up those of a row, always in this order.
Columns whose numbers in the panel are equal modulo `classes` share banks. So the ways of a quarter
warp take non-zeros of different classes in turn, as far as a piece has them.
"""

from dataclasses import dataclass
from heapq import heapreplace
from itertools import islice

import torch
from torch import Tensor

from sparsebench.formats._format import rows_of
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common.declarations import listed, record

PAIR = 2  # non-zeros that a lane reads at a time
AHEAD = 2  # steps that a warp reads before it needs them
ROW_COST = 3  # cost of the end of a segment, in pairs
SHORT = 8  # cost up to which a row is never cut


@dataclass(frozen=True)
class PanelShape:
    """The division of a CTA's work, in the terms of csr_cuda.cu.

    bounds  int64 [groups + 1]: first row of each group
    parts   int64 [n]: pieces of each row
    chunk   columns, a multiple of four
    """

    bounds: Tensor
    parts: Tensor
    chunk: int
    warps: int
    ways: int
    classes: int


@dataclass(frozen=True)
class PanelLists:
    """The lists of csr_cuda.cu, on the device of W.

    starts   Start [groups * chunks * warps + 1], as int32: of each warp
    teams    int32 [teams + 1, ways]: the piece within its group + 2^16 x the steps of the team
    pieces   int32 [n + 1]: first piece of each row
    targets  int64 [nnz]: index of each non-zero of W among the steps
    places   int64 [nnz]: its column in the panel
    size     non-zeros of all steps, with padding and those that are read ahead
    """

    starts: Tensor
    teams: Tensor
    pieces: Tensor
    targets: Tensor
    places: Tensor
    size: int


def work_of(w: Csr, shape: PanelShape) -> PanelLists:
    """Divide the rows of W and deal them."""
    (n, k), device, ways, parts = w.shape, w.columns.device, shape.ways, shape.parts
    chunks, columns = -(-k // shape.chunk), w.columns.long()
    place = columns % shape.chunk
    place ^= (place >> 2) & (shape.classes - 1)
    row_chunk = rows_of(w.offsets) * chunks + columns // shape.chunk
    pairs = (torch.bincount(row_chunk, minlength=n * chunks).view(n, chunks) + PAIR - 1) // PAIR

    pieces = torch.cat([parts.new_zeros(1), parts.cumsum(0)])
    row_of = torch.arange(n, device=device).repeat_interleave(parts)
    part = torch.arange(len(row_of), device=device) - pieces[row_of]
    begins = pairs[row_of] * part[:, None] // parts[row_of, None]
    lengths = pairs[row_of] * (part[:, None] + 1) // parts[row_of, None] - begins

    # Teams, in the order of buckets (a group and a chunk), in each bucket the longest first.
    piece, chunk = lengths.nonzero(as_tuple=True)
    group = torch.searchsorted(shape.bounds[1:], row_of, right=True)[piece]
    bucket, length = group * chunks + chunk, lengths[piece, chunk]
    order = length.argsort(descending=True, stable=True)
    order = order[bucket[order].argsort(stable=True)]
    piece, chunk, group, bucket, length = (a[order] for a in (piece, chunk, group, bucket, length))
    rank = ranks(bucket)
    buckets = (len(shape.bounds) - 1) * chunks
    of_bucket = (torch.bincount(bucket, minlength=buckets) + ways - 1) // ways
    team = (of_bucket.cumsum(0) - of_bucket)[bucket] + rank // ways
    way = rank % ways

    # Each warp's teams, one after the other.
    in_bucket = torch.arange(buckets, device=device).repeat_interleave(of_bucket)
    steps = torch.empty_like(in_bucket)
    steps[team[way == 0]] = length[way == 0]
    warp = torch.tensor(_dealt(steps, of_bucket, shape.warps), device=device, dtype=torch.int64)
    worker = in_bucket * shape.warps + warp
    order = worker.argsort(stable=True)
    worker, steps, in_bucket = worker[order], steps[order], in_bucket[order]
    place_of_team = torch.empty_like(order)
    place_of_team[order] = torch.arange(len(order), device=device)
    team = place_of_team[team]
    ends = steps.cumsum(0)
    of_worker = steps.new_zeros(2, buckets * shape.warps + 1)
    of_worker[0, 1:] = torch.bincount(worker, minlength=buckets * shape.warps)
    of_worker[1, 1:].scatter_add_(0, worker, steps)
    first_team, first_step = of_worker.cumsum(1)
    starts = listed(record("csr_cuda", "Start"), team=first_team, step=first_step)
    group_pieces = pieces[shape.bounds]
    unused = group_pieces.diff()[in_bucket // chunks]  # a piece whose sums are not read
    teams = steps.new_zeros(len(steps) + 1, ways)
    teams[:-1] = (unused | steps << 16)[:, None]
    teams[team, way] = (piece - group_pieces[group]) | steps[team] << 16

    # For each non-zero, its piece by its number in the row, then its turn in the piece.
    first, lane = torch.zeros_like(begins), torch.zeros_like(begins)
    first[piece, chunk], lane[piece, chunk] = (ends - steps)[team], way
    row, at = row_chunk // chunks, row_chunk % chunks
    number = ranks(row_chunk) // PAIR
    of_piece = pieces[row] + ((number + 1) * parts[row] - 1) // pairs[row, at]
    way, segment = lane[of_piece, at], of_piece * chunks + at
    kind = (place - way) % shape.classes
    number = _in_turn(segment, kind, lengths.view(-1), shape.classes)
    step = first[of_piece, at] + number // PAIR
    targets = (step * ways + way) * PAIR + number % PAIR
    size = (int(steps.sum()) + AHEAD + 1) * ways * PAIR
    teams, pieces = teams.to(torch.int32), pieces.to(torch.int32)
    return PanelLists(starts, teams, pieces, targets, place, size)


def bounds_of(lengths: Tensor, groups: int) -> Tensor:
    """Return int64 [groups + 1]: the first row of each group, for groups of about equal cost."""
    costs = _costs(lengths)
    ends = costs.cumsum(0)
    targets = torch.arange(1, groups, device=costs.device) * ends[-1] // groups
    inner = torch.searchsorted(ends - costs // 2, targets)
    return torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), len(costs))])


def parts_of(lengths: Tensor, bounds: Tensor, cuts: int) -> Tensor:
    """Return int64 [n], the number of pieces of each row, with at most `cuts` cuts per group."""
    costs = _costs(lengths)
    ends = torch.cat([costs.new_zeros(1), costs.cumsum(0)])
    fair = (ends[bounds].diff() // cuts + 1).clamp(min=SHORT)
    pieces: Tensor = (costs - 1) // fair.repeat_interleave(bounds.diff()) + 1
    return pieces


def _dealt(steps: Tensor, of_bucket: Tensor, warps: int) -> list[int]:
    """Return the warp of each team: the longest first, each to the least loaded warp of its CTA."""
    costs, warp = iter((steps + ROW_COST).tolist()), []
    for teams in of_bucket.tolist():
        loads = [(0, number) for number in range(warps)]
        for cost in islice(costs, teams):
            load, number = loads[0]
            warp.append(number)
            heapreplace(loads, (load + cost, number))
    return warp


def ranks(numbers: Tensor) -> Tensor:
    """Return for each of the sorted numbers how many equal numbers precede it."""
    _, counts = torch.unique_consecutive(numbers, return_counts=True)
    index = torch.arange(len(numbers), device=numbers.device)
    before: Tensor = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return index - before


def _costs(lengths: Tensor) -> Tensor:
    return lengths // PAIR + ROW_COST


def _in_turn(segment: Tensor, kind: Tensor, lengths: Tensor, kinds: int) -> Tensor:
    """Return the place of each non-zero in its segment, which has PAIR * lengths places.

    Place p has kind p % kinds, as long as there are non-zeros of that kind. Others fill the gaps.
    """
    if kinds == 1:
        return _counted(segment)
    order = (segment * kinds + kind).argsort(stable=True)
    turn = torch.empty_like(segment)
    turn[order] = ranks((segment * kinds + kind)[order])
    sizes = PAIR * lengths
    begins = sizes.cumsum(0) - sizes
    place = turn * kinds + kind
    surplus = place >= sizes[segment]
    gap = torch.ones(int(sizes.sum()) + 1, dtype=torch.bool, device=segment.device)
    gap[(begins[segment] + place)[~surplus]] = False
    before = gap.cumsum(0) - gap.long()
    late = surplus.nonzero()[:, 0]
    late = late[segment[late].argsort(stable=True)]
    gaps = gap.nonzero()[:, 0]
    place[late] = gaps[before[begins[segment[late]]] + ranks(segment[late])] - begins[segment[late]]
    return place


def _counted(numbers: Tensor) -> Tensor:
    """Return for each number how many equal numbers precede it."""
    order = numbers.argsort(stable=True)
    counted = torch.empty_like(numbers)
    counted[order] = ranks(numbers[order])
    return counted
