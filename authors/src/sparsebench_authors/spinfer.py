"""Unstructured weights on tensor cores by SpInfer's authors: their bitmap format and their kernel.

    Y.T = W X.T      bits of 8 x 8, values, offsets of 64 x 64 and 16 x 64     decoded to registers

nvcc builds their code once, in ten seconds. Their compressor takes a second for 14336 x 4096 on one
CPU core. The number of parts of k is searched; another kernel adds up the parts. There are no other
choices, and no kernel with Hopper's instructions.

    needs   --peers DIR with a checkout (_builds.py), nvcc, compute capability 8.0 or newer
    dtype   fp16 with fp32 accumulation, parts of k in fp16
    sizes   n and k multiples of 64; m padded to 8, 16, 32, 64 or a multiple of 128
    launch  with shared memory for the fullest tile of 64 x 64; their launch has room for 2304 of
            its 4096 values, about 47 % sparsity (spinfer.cu)

Source: Fan et al., SpInfer, EuroSys 2025; github.com/HPMLL/SpInfer_EuroSys25, Apache-2.0, csrc.
"""

import ctypes

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common import foreign_code
from sparsebench.kernels._common.padding import multiple_of, padded
from sparsebench.kernels._common.requirements import AMPERE, unmet
from sparsebench.kernels._common.search import fastest_choice
from sparsebench.kernels._kernel import Kernel, Launch, Lossy, Operands
from sparsebench.results.record import Problem
from sparsebench_authors import _builds

REPOSITORY = "github.com/HPMLL/SpInfer_EuroSys25"
MARKER = "csrc/SpMM_API.cu"
SPLITS = 1, 2, 4, 8, 16  # parts of k; their benchmark sets it by hand for each shape
TILE = 64
FEW, MANY = (8, 16, 32, 64), 128


def prepare(operands: Operands, *, split: int | None = None) -> Launch:
    """Compress the weight, and choose the fastest split unless one is given or pinned.

    Raises Unsupported if k has too few tiles for the split.
    """
    k = operands.weights["w"].shape[1]
    fixed, splits = (operands.pinned or {}).get("split", split), possible(k)
    if fixed is not None and fixed not in splits:
        raise Unsupported(f"expected a split among {splits} for k = {k}, found {fixed}")
    x = operands.activations["x"]
    tokens = padded(x, tokens_of(len(x)))
    code, digest = _builds.compiled("spinfer", MARKER, x.device)
    w = operands.weights["w"].to_dense().cpu().contiguous()
    *packed, largest = compressed(code, w)
    arrays = [array.to(x.device) for array in packed]
    n, room = len(w), int(largest)
    out = x.new_empty(len(tokens.whole), n)
    parts = x.new_empty(max(SPLITS) * out.numel())

    def run(split: int) -> Tensor:
        weight = *map(foreign_code.pointer, arrays), room
        whole = tokens.filled()
        ends = map(foreign_code.pointer, (whole, out))
        rest = n, len(whole), k, foreign_code.pointer(parts), split
        stream = foreign_code.stream_of(x.device)
        _builds.require_success(code.multiply(stream, *weight, *ends, *rest))
        return out[: len(x)]

    choices = [{"split": s} for s in (splits if fixed is None else (fixed,))]
    facts = {"stored_bytes": sum(array.nbytes for array in packed), "digest": digest}
    launch = fastest_choice(run, choices, operands, **tokens.choice, **facts)
    best = launch.choice["split"]
    parts = parts[: best * out.numel() if best > 1 else 0].clone()  # frees the rest
    return launch


def possible(k: int) -> list[int]:
    """Return the splits whose last part has tiles of k.

    Their kernel gives ceil(tiles / split) tiles to each part but the last. With k = 576 in 8 parts
    the last part would start at tile 14 of 9, and its sums were NaN.
    """
    tiles = k // TILE
    return [split for split in SPLITS if (split - 1) * -(-tiles // split) < tiles]


def tokens_of(m: int) -> int:
    return next((few for few in FEW if few >= m), multiple_of(MANY, m))


def compressed(code: ctypes.CDLL, w: Tensor) -> list[Tensor]:
    """Return values, offsets of both tiles, bitmaps, and the largest count of a tile."""
    arrays = [ctypes.c_void_p() for _ in range(4)]
    most, stored = ctypes.c_int(), ctypes.c_int()
    values, tiles, median, bitmap = arrays
    ends = map(ctypes.byref, (values, tiles, median, bitmap, most, stored))
    count = code.compress(foreign_code.pointer(w), *w.shape, *ends)
    if count < 0:
        raise MemoryError
    copies = [
        _builds.copied(values, stored.value, torch.float16),
        _builds.copied(tiles, count + 1, torch.int32),
        _builds.copied(median, 4 * count, torch.int32),
        _builds.copied(bitmap, TILE * count, torch.int64),
    ]
    for array in arrays:
        code.release(array)
    return [*copies, torch.tensor([most.value], dtype=torch.int32)]


def unsupported(problem: Problem, device: torch.device) -> str | None:
    reason = unmet(problem, device, AMPERE, "fp16", newer=True, n=TILE, k=TILE)
    return reason or _builds.missing(MARKER, REPOSITORY)


LOSSY = Lossy({"fp16": 0.0004}, "sums of a split k are added in 16 bits")
KERNEL = Kernel("linear", "csr", "cuda", prepare, unsupported, lossy=LOSSY)
