"""Block-sparse attention for few queries, as in decoding, in Triton: each list is split.

    list of a row    | 0 | 3 | 4 | 9 | 12 | 31 |        16 blocks of 64 keys, for instance
    splits           | program 0     | program 1    |   each has a part of O, and a sum and maximum
    merged           the program that comes last, by a counter, adds the parts up in their order

A row of a decoding step has one query of each head. The heads of a group are packed into a tile, so
K and V of a key head are read once. There is one tile per sequence and key head, too few for
all SMs, so `splits` programs share the list of each. The order of the sum does not depend on which
program comes last, so the same operands give the same bits. The counters return to zero.

The time is bound by the bytes of the selected blocks. For 16 sequences it is about 30 us, so the
loads before the first load of K matter: rows have no order, if all lists are equally long the
kernel reads no offset, and Q is loaded by pointers, because a TMA load would be waited for first.
The kernel is that of attention_triton.py.
"""

from dataclasses import replace
from itertools import product

import torch

from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels.attention._call import AttentionCall, ListedMask, attention_engine
from sparsebench.kernels.attention._shapes import Config, query_config, query_tiles
from sparsebench.kernels.attention._shapes import unsupported as unsupported_by_triton
from sparsebench.kernels.attention.attention_triton import path_of, plan
from sparsebench.results.record import Problem

MOST_QUERIES = 16  # most queries of a sequence; more fill the SMs without a split
FEW_ROWS = 16  # rows of a tile: the fewest that tl.dot takes
PARTS = 1, 2, 0.5  # programs for each SM, among which the search chooses


def choices(w: ListedMask, call: AttentionCall) -> list[Config]:
    """Return the configurations to try, the default first."""
    shape, shared, path = call.shape, w.shared(call.shape), path_of(w, call)
    programs = multiprocessors(w.mask.columns.device)
    steps = [(32, 4, 2)] if shape.itemsize == 4 else [(64, 4, 3), (64, 8, 3), (128, 4, 2)]
    tiles = [
        query_config(shape, shared, (FEW_ROWS, *step), path)
        for step in steps
        if step[0] * shape.depth * shape.itemsize <= 32 * 1024
    ]
    configs = [
        replace(tile, splits=max(1, min(64, round(parts * programs / query_tiles(shape, tile)))))
        for tile, parts in product(tiles, PARTS)
    ]
    return list(dict.fromkeys(configs))


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the kernel cannot run the problem here, or None."""
    if problem["m"] > MOST_QUERIES:
        return f"expected at most {MOST_QUERIES} queries of a sequence, found {problem['m']}"
    return unsupported_by_triton(problem, device)


KERNEL = attention_engine("attention_split", "attention", choices, plan, unsupported, Config)
