"""Gated feed-forward layer for up to 64 tokens, few active units: one launch of ffn_few.cu.

    G = X @ Wg.T        Y = (act(G) * (X @ Wu.T)) @ Wd.T        act is relu or relu2

The kernel reads all of Wg, and each row of Wu and Wd whose unit is active for any token once. With
few active units it reads little more than Wg; with all active, as much as a dense layer.

    m, tokens    CTAs that share K, for k = 2048 (4096)     limit
    1 to 16              1  (2)        three tiles of 16 rows of weights in shared memory
    17 to 32             1  (2)        a CTA's part of X, 128 KB at most, in registers
    33 to 64             2  (4)        the same

An H200 runs 66 clusters of two at a time, but only 30 of four, because a cluster lies in one GPC.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.operator import NoConfig
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.scratch import counters
from sparsebench.kernels.twell import _call
from sparsebench.kernels.twell._call import TwellCall, twell_engine
from sparsebench.results.record import Problem

MOST_TOKENS, FEWEST_TOKENS = 64, 8  # per cuda.launch; m is padded to a power of two
TOKENS_TO_SPLIT = 16
MOST_N = 28672  # shared memory for lists
PART, X_SIZE = 2048, 64 * 1024  # columns of K, and values of X in registers, of a CTA
WARPS, SHARED_BYTES = 11, 226 * 1024


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the kernel cannot run the problem on the device, or None."""
    m, n = problem["m"], problem["n"]
    if not 1 <= m <= MOST_TOKENS:
        return f"expected 1 to {MOST_TOKENS} tokens, found {m}"
    if n > MOST_N:
        return f"expected n up to {MOST_N}, found {n}"
    return _call.unsupported(problem, device)


def shape_of(m: int, k: int, at_once: Callable[[int], int]) -> tuple[int, int, int]:
    """Return the padded tokens, the CTAs that share K, and the clusters of these that run at once.

    `at_once` maps the size of a cluster to the number of clusters that run at the same time.
    """
    tokens = FEWEST_TOKENS
    while tokens < m:
        tokens *= 2
    ctas = 1
    while ctas * PART < k or ctas * X_SIZE < tokens * k:
        ctas *= 2
    split = split_of(tokens, ctas)
    return tokens, ctas, at_once(split) * split // ctas


def split_of(tokens: int, ctas: int) -> int:
    """Return the CTAs that share a slice of Y; at least two from 16 tokens on.

    With two, a slice is 32 columns wide, 64 bytes of each row of Wd, and a CTA reads half of H.
    """
    return max(ctas, 2) if tokens >= TOKENS_TO_SPLIT else ctas


def clusters_of(ctas: int, device: torch.device) -> int:
    """Return how many clusters of the kernel's CTAs run at a time."""
    return cuda.clusters_at_once(ctas, 32 * WARPS, SHARED_BYTES, device)


def constants_of(call: TwellCall, shape: tuple[int, int, int]) -> cuda.Constants:
    """Return the macros of ffn_few.cu; `shape` is the result of `shape_of`."""
    sizes = zip(("TOKENS", "CTAS", "CLUSTERS"), shape, strict=True)
    flags = {
        "SPLIT": split_of(*shape[:2]),
        "SQUARED": call.squared,
        "GATED": call.gated,
        "FP16": call.dtype == torch.float16,
    }
    named = {"N": call.n, "K": call.k, **dict(sizes), **flags}
    return tuple((name, int(value)) for name, value in named.items())


def words_of(n: int, clusters: int) -> int:
    """Return how many words of 64 bits mark the active units: one for 48 units of a cluster."""
    eights = -(-(n // 8) // clusters)  # of a cluster's units, at most
    return clusters * -(-eights // 6)


def plan(device: torch.device, call: TwellCall, config: NoConfig) -> Product:
    """Compile for the sizes. H is new in each call; words and counters are shared (scratch.py)."""
    n, k = call.n, call.k
    shape = tokens, ctas, clusters = shape_of(call.m, k, partial(clusters_of, device=device))
    constants = constants_of(call, shape)
    kernel = cuda.load("ffn_few", "multiply_few", constants, SHARED_BYTES, device)
    loaded = kernel.on(ctas * clusters, 32 * WARPS, together=True)
    words = words_of(n, clusters)

    def run(
        x: Tensor, gate: Tensor, up: Tensor | None, wd_t: Tensor, out: Tensor | None = None
    ) -> Tensor:
        y, h = x.new_empty(x.shape) if out is None else out, x.new_empty(n, tokens)
        zeros = counters(x, 2 + 2 * words)  # words have 64 bits; the kernel resets all to zero
        assert zeros is not None
        tensors = x, gate, gate if up is None else up, wd_t, y, h, zeros
        counts = zeros.data_ptr() + 8 * words
        args = kernel.arguments(*(t.data_ptr() for t in tensors), counts, len(x))
        cuda.on_tape(h)
        return cuda.launch(loaded, args, y, loaded, *tensors[1:4], zeros)

    return Product(run, kernel.code)


KERNEL = twell_engine("ffn_few", lambda call: [NoConfig()], plan, unsupported)
