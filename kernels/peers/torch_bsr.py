"""PyTorch's own BSR product on an NVIDIA GPU: its Triton kernel, as shipped or tuned.

    as shipped   torch.nn.functional.linear(x, bsr): tile parameters from torch's table, which has
                 the A100 only; on other GPUs one stage, four warps and r tokens per tile
    tuned=True   torch.sparse._triton_ops.bsr_dense_addmm with the fastest parameters of a search

The search times the entry of torch's table for the A100 at this size, and tiles, stages and warps
together. Around the fastest it tries groups and a copy of X.T. A later process of a verdict times
the finalists of both searches in one.

Both write Y.T as a view of the token-major Y, and read X.T as a view of X. With `tuned`, the launch
first copies X.T if that is faster in total.

As shipped, blocks must be square and divide n and k. torch uses its Triton kernel if the side is a
power of two of at least 16 that divides the tokens. Otherwise it gathers rows and multiplies in
fp32 without a warning (`path` in the choice). The other ways always use the Triton kernel: block
sides must be powers of two of at least 16, and tokens are padded to a multiple of 16
(_common/padding.py). fp32 and tf32 problems run without tensor cores, because TF32 is off.
Source: torch/sparse/_triton_ops.py; ATen/native/sparse/cuda/SparseBlasImpl.cpp.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.padding import Tokens, multiple_of, padded
from sparsebench.kernels._common.search import finalists, part_of, search
from sparsebench.kernels._common.transposed import dgrad_of
from sparsebench.kernels._kernel import Kernel, Launch, Operands, refuse
from sparsebench.results.record import Problem

TOKEN_TILES = 16, 32, 64, 128, 256
WIDEST = 3  # token tiles to try: the widest that divide m, beside torch's own
STAGES_AND_WARPS = (1, 4), (2, 4), (3, 4), (4, 4), (5, 4), (2, 2), (4, 2), (1, 8), (2, 8), (3, 8)
UNROLLED = 2**20  # fp32 multiply-adds of a tile, which are unrolled; more compile for minutes
GROUPS = 1, 4, 8  # block rows that programs visit together to share the L2 cache
DEFAULT = {"GROUP_SIZE_ROW": 4, "num_stages": 1, "num_warps": 4}  # torch's; SPLIT_N = m / r
TABLE = "NVIDIA A100-SXM4-80GB"  # the only GPU of torch's table
AS_SHIPPED = {"as_shipped": True}
STAGES = "tile", "group and copy"  # stages of the search
COMPILERS = 8  # threads that compile


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] == "fp8":
        return "torch's BSR product expected 16 or 32 bits, found fp8"
    return None if device.type == "cuda" else f"expected an NVIDIA GPU, found device {device}"


def prepare(operands: Operands, *, tuned: bool = False) -> Launch:
    """Pass the format's arrays to torch; if `tuned`, search parameters. Raises Unsupported."""
    w, x = operands.weights["w"], operands.activations["x"]
    assert isinstance(w, Bsr)
    if not isinstance(tuned, bool):
        note = "; torch, its own tuner, was removed in 0.4: true searches more"
        raise Unsupported(f"option tuned: expected true or false, found {tuned!r}{note}")
    refuse(unsupported_blocks(w) if tuned else unsupported_as_shipped(w))
    tokens = padded(x, multiple_of(TOKEN_TILES[0], len(x)))
    with warnings.catch_warnings():
        # torch warns once that BSR is beta, and for each shape that its table lacks this GPU.
        warnings.filterwarnings("ignore", message="Sparse BSR tensor support is in beta")
        warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
        warnings.filterwarnings("ignore", message=".*non-optimal triton kernel parameters")
        bsr = torch.sparse_bsr_tensor(
            w.offsets, w.columns, w.values, size=w.shape, check_invariants=False
        )
        if not tuned:
            launch = Launch(_call(bsr, tokens, AS_SHIPPED), {"path": path_of(w, len(x))})
            launch()
            return launch
        if operands.pinned:
            choice = dict(operands.pinned)
            return Launch(_call(bsr, tokens, choice), choice)
        return _tuned(bsr, tokens, w.block, operands.timed)


def path_of(w: Bsr, m: int) -> str:
    """Return how torch.nn.functional.linear multiplies."""
    return "gather, fp32" if unsupported_blocks(w) or m % w.block[0] else "Triton"


def unsupported_as_shipped(w: Bsr) -> str | None:
    """Return which condition of torch.nn.functional.linear fails, or None."""
    (n, k), (r, c) = w.shape, w.block
    if n % r or k % c:
        return f"torch expected blocks that divide W, found {r}x{c} in {n}x{k}"
    return None if r == c else f"torch expected square blocks, found {r}x{c}"


def unsupported_blocks(w: Bsr) -> str | None:
    """Return why torch's Triton kernel cannot multiply, or None."""
    (n, k), (r, c) = w.shape, w.block
    if any(side < 16 or side & (side - 1) or size % side for size, side in ((n, r), (k, c))):
        expected = "block sides that divide W and are powers of two >= 16"
        return f"torch expected {expected}, found {r}x{c} in {n}x{k}"
    return None


def token_tiles(m: int, block: tuple[int, int], dtype: torch.dtype) -> list[int]:
    """Return the token tiles to time, including torch's (r) if it divides m."""
    r, c = block
    most = UNROLLED // (r * c) if dtype == torch.float32 else max(TOKEN_TILES)
    fitting = [t for t in TOKEN_TILES if m % t == 0 and t <= max(most, TOKEN_TILES[0])]
    return sorted({*fitting[-WIDEST:], *([r] if m % r == 0 else [])})


def _tuned(
    bsr: Tensor, tokens: Tokens, block: tuple[int, int], before: Sequence[Mapping[str, Any]]
) -> Launch:
    """Search tiles, stages and warps together; then, for the best, the group and the copy."""
    repeated = [choice for stage in STAGES for choice in finalists(part_of(stage, before))]
    if repeated:
        repeated = [choice for i, choice in enumerate(repeated) if choice not in repeated[:i]]
        best, timed = _fastest(bsr, tokens, repeated, "finalists")
        return Launch(_call(bsr, tokens, best), best, candidates=timed)
    x = tokens.whole
    m = len(x)
    metas = [
        {**DEFAULT, "SPLIT_N": m // tile, "num_stages": s, "num_warps": w, **tokens.choice}
        for tile, (s, w) in product(token_tiles(m, block, x.dtype), STAGES_AND_WARPS)
    ]
    best, timed = _fastest(bsr, tokens, [*_in_table(bsr, x, block), *metas], STAGES[0])
    near = [
        {**best, "GROUP_SIZE_ROW": group, "x_copied": copied}
        for group, copied in product(GROUPS, (False, True))
    ]
    best, more = _fastest(bsr, tokens, [best, *near], STAGES[1])
    return Launch(_call(bsr, tokens, best), best, candidates=timed + more)


def _in_table(bsr: Tensor, x: Tensor, block: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the entry of torch's table for these sizes on its GPU, or no entry."""
    from torch.sparse._triton_ops_meta import get_meta

    sizes = *bsr.shape, len(x), *block
    key, version = (*sizes, True, False, True), (0, x.dtype, 0.5)  # beta 0, alpha 1
    result = get_meta("bsr_dense_addmm", key, TABLE, version=version, exact=True)
    return [dict(result)] if result else []


def _fastest(
    bsr: Tensor, tokens: Tokens, choices: list[dict[str, Any]], of: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    calls = [_call(bsr, tokens, choice) for choice in choices]
    result = search(calls, bsr.device, COMPILERS)
    return choices[result.best], result.lines(choices, whole=True, of=of)


def _call(bsr: Tensor, tokens: Tokens, choice: Mapping[str, Any]) -> Callable[[], Tensor]:
    from torch.sparse._triton_ops import bsr_dense_addmm

    if choice == AS_SHIPPED:
        return lambda: torch.nn.functional.linear(tokens.x, bsr).contiguous()
    meta = {name: value for name, value in choice.items() if name not in ("x_copied", "tokens")}
    copied = choice.get("x_copied", False)

    def run() -> Tensor:
        x = tokens.filled()
        y = x.new_empty(len(x), bsr.shape[0])
        x_transposed = x.t().contiguous() if copied else x.t()
        # With beta = 0 the first argument is not read.
        bsr_dense_addmm(y.t(), bsr, x_transposed, beta=0, alpha=1, out=y.t(), meta=meta)
        return y[: len(tokens.x)]

    return run


KERNEL = Kernel("linear", "bsr", "cuda", prepare, unsupported)

DGRAD = dgrad_of(KERNEL)
"""Input gradient by PyTorch's own BSR product, which has no backward on a GPU."""
