"""Gated feed-forward layer for up to 64 tokens, few units on: one launch of ffn_few.cu.

    G = X @ Wg.T        Y = (act(G) * (X @ Wu.T)) @ Wd.T        act is relu or relu2

Wg is read whole; of Wu and Wd the rows of units that are on for any token, each once. So few units
on take little more than Wg's bytes, and all units what a dense layer takes.

    m, tokens    CTAs of a cluster, which share K, for k of 2048 (4096)     why
    1 to 16              1  (2)        three tiles of 16 rows of weights fit into shared memory
    to 32                1  (2)        X's part, 128 KB at most, is in registers
    to 64                2  (4)

An H200 runs 66 clusters of two at one time, but only 30 of four: each is in one GPC.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.cuda import (
    BoundKernel,
    Constants,
    Layout,
    Loaded,
    clusters_at_once,
    load,
)

MOST_TOKENS, FEWEST_TOKENS = 64, 8  # what a launch multiplies, of which m are there
TOKENS_TO_SPLIT = 16
MOST_K, MOST_N = 4096, 28672  # registers for X; shared memory for lists
PART, X_SIZE = 2048, 64 * 1024  # of K, and of X in registers, for each CTA of a cluster
WARPS, SHARED_BYTES = 11, 226 * 1024

# x, wg, wu, wd transposed, y, h, words, counters; m
ARGUMENTS = Layout(*"PPPPPPPPi")


def unsupported(m: int, n: int, k: int) -> str | None:
    """Say why the kernel cannot run m tokens through weights [n, k], or None."""
    if not 1 <= m <= MOST_TOKENS:
        return f"expected 1 to {MOST_TOKENS} tokens, found {m}"
    if n % 8 or k % 8 or not n or not k:
        return f"expected n and k to be multiples of 8, found n {n} and k {k}"
    if k > MOST_K or n > MOST_N:
        return f"expected k up to {MOST_K} and n up to {MOST_N}, found k {k} and n {n}"
    return None


def shape_of(m: int, k: int, at_once: Callable[[int], int]) -> tuple[int, int, int]:
    """Return the tokens that are multiplied, the CTAs of a cluster, and the clusters `at_once`."""
    tokens = FEWEST_TOKENS
    while tokens < m:
        tokens *= 2
    ctas = 1
    while ctas * PART < k or ctas * X_SIZE < tokens * k:
        ctas *= 2
    split = split_of(tokens, ctas)
    return tokens, ctas, at_once(split) * split // ctas


def split_of(tokens: int, ctas: int) -> int:
    """Return the CTAs that share a slice of Y: two at least where rows of H are long.

    A slice is then 32 columns wide, 64 bytes of each row of Wd, and half of H is read.
    """
    return max(ctas, 2) if tokens >= TOKENS_TO_SPLIT else ctas


def clusters_of(ctas: int, device: torch.device) -> int:
    """Return how many clusters of the kernel's CTAs run at one time."""
    return clusters_at_once(ctas, 32 * WARPS, SHARED_BYTES, device)


def constants_of(
    n: int, k: int, shape: tuple[int, int, int], squared: bool, gated: bool, dtype: torch.dtype
) -> Constants:
    """Return what the kernel is compiled for; the shape is `shape_of`'s."""
    sizes = zip(("TOKENS", "CTAS", "CLUSTERS"), shape, strict=True)
    flags = {
        "SPLIT": split_of(*shape[:2]),
        "SQUARED": squared,
        "GATED": gated,
        "FP16": dtype == torch.float16,
    }
    return ("N", n), ("K", k), *sizes, *((name, int(flag)) for name, flag in flags.items())


def words_of(n: int, clusters: int) -> int:
    """Return the words that say who is on, one for 48 units of a cluster."""
    eights = -(-(n // 8) // clusters)  # of units, at most
    return clusters * -(-eights // 6)


def launch(
    x: Tensor, wg: Tensor, wu: Tensor | None, wd_t: Tensor, y: Tensor, *, squared: bool
) -> BoundKernel:
    """Return the program that writes Y.

    x and y [m, k], wg, wu and wd_t [n, k]; all contiguous at 16 bytes, fp16 or bf16. Without wu,
    Y = act(X @ Wg.T) @ Wd.T. H and the words are the program's own: it may not run in two streams
    at a time. Raises Unsupported.
    """
    (m, k), n, device = x.shape, len(wg), x.device
    if reason := unsupported(m, n, k):
        raise Unsupported(reason)
    shape = tokens, ctas, clusters = shape_of(m, k, partial(clusters_of, device=device))
    constants = constants_of(n, k, shape, squared, wu is not None, x.dtype)
    kernel, code = load("ffn_few", "multiply_few", constants, SHARED_BYTES, device)
    loaded = Loaded(
        kernel, code, device.index, ctas * clusters, 32 * WARPS, SHARED_BYTES, together=True
    )
    h, words = x.new_empty(n, tokens), x.new_zeros(words_of(n, clusters), dtype=torch.int64)
    counts = x.new_zeros(2, dtype=torch.int32)  # the kernel leaves both so
    kept = x, wg, wg if wu is None else wu, wd_t, y, h, words, counts
    return BoundKernel(loaded, ARGUMENTS(*(t.data_ptr() for t in kept), m), kept, y)
