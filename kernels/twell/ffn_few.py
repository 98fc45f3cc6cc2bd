"""Gated feed-forward layer for up to 64 tokens, few active units: one launch of ffn_few.cu.

    G = X @ Wg.T        Y = (act(G) * (X @ Wu.T)) @ Wd.T        act is relu or relu2

The kernel reads all of Wg, and each row of Wu and Wd whose unit is active for any token once. With
few active units it reads little more than Wg; with all active, as much as a dense layer.

    m, tokens    CTAs that share K, for k = 2048 (4096)     limit
    1 to 16              1  (2)        three tiles of 16 rows of weights in shared memory
    17 to 32             1  (2)        a CTA's part of X, 128 KB at most, in registers
    33 to 64             2  (4)        the same

An H200 runs 66 clusters of two at a time, but only 30 of four, because a cluster lies in one GPC.

X is read by loads or by bulk copies. From COPIES_FROM tokens on, `prepare` times both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.cuda import (
    BoundKernel,
    Constants,
    Layout,
    Loaded,
    clusters_at_once,
    compile_ahead,
    load,
    on_tape,
)
from sparsebench.kernels._common.scratch import counters
from sparsebench.kernels._common.search import search
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.twell import _layer
from sparsebench.kernels.twell._layer import MOST_K, Layer, Plan, layer_of
from sparsebench.results.record import Problem

MOST_TOKENS, FEWEST_TOKENS = 64, 8  # per launch; m is padded to a power of two
TOKENS_TO_SPLIT = 16
MOST_N = 28672  # shared memory for lists
PART, X_SIZE = 2048, 64 * 1024  # columns of K, and values of X in registers, of a CTA
WARPS, SHARED_BYTES = 11, 226 * 1024
COPIES_FROM, MOST_COPIED_N = 33, 16384  # tokens; with more units, X has no room beside their lists

XBy = Literal["loads", "copies"]
"""How X reaches the registers: by loads of 16 bytes, or by bulk copies through shared memory."""


@dataclass(frozen=True)
class Config:
    """How X reaches the registers."""

    x_by: XBy


# x, wg, wu, wd transposed, y, h, words, counters; m
ARGUMENTS = Layout(*"PPPPPPPPi")


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the kernel cannot run the problem on the device, or None."""
    sizes = problem["m"], problem["n"], problem["k"]
    return unsupported_sizes(*sizes) or _layer.unsupported(problem, device)


def unsupported_sizes(m: int, n: int, k: int) -> str | None:
    """Return why the kernel cannot run m tokens through weights [n, k], or None."""
    if not 1 <= m <= MOST_TOKENS:
        return f"expected 1 to {MOST_TOKENS} tokens, found {m}"
    if n % 8 or k % 8 or not n or not k:
        return f"expected n and k to be multiples of 8, found n {n} and k {k}"
    if k > MOST_K or n > MOST_N:
        return f"expected k up to {MOST_K} and n up to {MOST_N}, found k {k} and n {n}"
    return None


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
    return clusters_at_once(ctas, 32 * WARPS, SHARED_BYTES, device)


def constants_of(
    n: int,
    k: int,
    shape: tuple[int, int, int],
    squared: bool,
    gated: bool,
    dtype: torch.dtype,
    x_by: XBy = "loads",
) -> Constants:
    """Return the macros of ffn_few.cu; `shape` is the result of `shape_of`."""
    sizes = zip(("TOKENS", "CTAS", "CLUSTERS"), shape, strict=True)
    flags = {
        "SPLIT": split_of(*shape[:2]),
        "SQUARED": squared,
        "GATED": gated,
        "FP16": dtype == torch.float16,
        "COPIED_X": x_by == "copies",
    }
    return ("N", n), ("K", k), *sizes, *((name, int(flag)) for name, flag in flags.items())


def words_of(n: int, clusters: int) -> int:
    """Return how many words of 64 bits mark the active units: one for 48 units of a cluster."""
    eights = -(-(n // 8) // clusters)  # of a cluster's units, at most
    return clusters * -(-eights // 6)


def ways_of(m: int, n: int) -> list[XBy]:
    """Return the methods to read X of m tokens that are timed, the default first."""
    return ["loads", "copies"] if m >= COPIES_FROM and n <= MOST_COPIED_N else ["loads"]


def launch(
    x: Tensor,
    wg: Tensor,
    wu: Tensor | None,
    wd_t: Tensor,
    y: Tensor,
    *,
    squared: bool,
    x_by: XBy = "loads",
) -> BoundKernel:
    """Return the kernel that writes Y.

    x and y [m, k], wg, wu and wd_t [n, k]; all contiguous at 16 bytes, fp16 or bf16. Without wu,
    Y = act(X @ Wg.T) @ Wd.T. The launch owns H and the words, so it must not run in two streams at
    the same time. Raises Unsupported.
    """
    (m, k), n, device = x.shape, len(wg), x.device
    if reason := unsupported_sizes(m, n, k):
        raise Unsupported(reason)
    shape = tokens, ctas, clusters = shape_of(m, k, partial(clusters_of, device=device))
    constants = constants_of(n, k, shape, squared, wu is not None, x.dtype, x_by)
    kernel, code = load("ffn_few", "multiply_few", constants, SHARED_BYTES, device)
    loaded = Loaded(
        kernel, code, device.index, ctas * clusters, 32 * WARPS, SHARED_BYTES, together=True
    )
    h, words = x.new_empty(n, tokens), x.new_zeros(words_of(n, clusters), dtype=torch.int64)
    counts = x.new_zeros(2, dtype=torch.int32)  # the kernel resets both to zero
    tensors = x, wg, wg if wu is None else wu, wd_t, y, h, words, counts
    return BoundKernel(loaded, ARGUMENTS(*(t.data_ptr() for t in tensors), m), tensors, y)


class Product:
    """The layer for up to `tokens` to call: a new Y of X and of these weights (selection.Product).

    Raises Unsupported.
    """

    pack = order = None

    def __init__(self, plan: Plan, config: Config) -> None:
        """Compile for the sizes."""
        tokens, n, k, device = plan.tokens, plan.n, plan.k, plan.device
        if reason := unsupported_sizes(tokens, n, k):
            raise Unsupported(reason)
        shape = self.tokens, ctas, clusters = shape_of(
            tokens, k, partial(clusters_of, device=device)
        )
        self.n, self.words = n, words_of(n, clusters)
        constants = constants_of(n, k, shape, plan.squared, True, plan.dtype, config.x_by)
        kernel, self.code = load("ffn_few", "multiply_few", constants, SHARED_BYTES, device)
        sizes = ctas * clusters, 32 * WARPS, SHARED_BYTES
        self.loaded = Loaded(kernel, self.code, device.index, *sizes, together=True)

    def run(self, x: Tensor, wg: Tensor, wu: Tensor, wd_t: Tensor) -> Tensor:
        """Compute Y; the caller checks the operands, which are those of `launch`."""
        y, h = x.new_empty(x.shape), x.new_empty(self.n, self.tokens)
        zeros = counters(x, 2 + 2 * self.words)  # the words have 64 bits each; the counts follow
        assert zeros is not None
        counts = zeros.data_ptr() + 8 * self.words
        tensors = x, wg, wu, wd_t, y, h, zeros
        self.loaded.enqueue(ARGUMENTS(*(t.data_ptr() for t in tensors), counts, len(x)))
        on_tape(h)
        on_tape(y, owners=(self, wg, wu, wd_t, zeros))
        return y


def prepare(operands: Operands) -> Launch:
    """Copy Wd.T, compile, and take the faster method to read X. Raises Unsupported."""
    return launch_of(layer_of(operands), operands.pinned)


def launch_of(layer: Layer, pinned: Mapping[str, Any] | None) -> Launch:
    """Return the launch with the pinned method to read X, or the faster one. Raises Unsupported."""
    (m, n, k), device = layer.sizes, layer.x.device
    if reason := unsupported_sizes(m, n, k):
        raise Unsupported(reason)
    ways = [pinned.get("x_by", "loads")] if pinned else ways_of(m, n)
    operands = layer.x, layer.gate, layer.up, layer.wd_t, layer.y
    shape = shape_of(m, k, partial(clusters_of, device=device))
    flags = layer.squared, layer.up is not None, layer.x.dtype
    compile_ahead("ffn_few", [constants_of(n, k, shape, *flags, way) for way in ways])
    kernels = [launch(*operands, squared=layer.squared, x_by=way) for way in ways]
    result = search(kernels, device)
    choices = [{"x_by": way} for way in ways]
    best = kernels[result.best]
    return Launch(best, choices[result.best], best.code, result.lines(choices))


KERNEL = Kernel("ffn", "cvse", "cuda", prepare, unsupported)
