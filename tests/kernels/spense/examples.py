"""Shapes, operands and the check of a product for the tests of the 2:4 hybrid kernels."""

from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from sparsebench.formats.slide import Slide
from sparsebench.formats.spense import Spense
from sparsebench.harness.bench.correctness import FP8, FP32, Expected, check
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.spense._call import SpenseCall
from sparsebench.kernels.spense.spense_wgmma import Config

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

# m, n, k, dense fraction, split: one tile; edges on all sides; both splits; all sparse, all dense;
# a last row of tiles without a neighbour; rows of tiles of both kinds in a group of four.
SHAPES = [
    (1, 8, 16, 0.0, "rows"),
    (20, 200, 528, 0.25, "columns"),
    (33, 320, 400, 0.5, "rows"),
    (16, 136, 1040, 0.5, "columns"),
    (5, 448, 784, 0.7, "rows"),
    (40, 192, 640, 1.0, "rows"),
    (17, 192, 640, 1.0, "columns"),
]
Shape = tuple[int, int, int, float, str]
# For spense_mma: n not a multiple of 8; fewer columns than a box; all 2:4.
ODD = [(3, 70, 8, 0.0, "rows"), (130, 258, 264, 0.5, "rows"), (9, 74, 648, 0.5, "columns")]
ODD += [(70, 322, 1048, 0.0, "rows")]

WGMMA_POWERS = [
    Config(tokens, cluster, 4) for tokens in (16, 32, 64, 128, 256) for cluster in (1, 2)
]
WGMMA_CONFIGS = [
    *WGMMA_POWERS,
    Config(16, 1, 6),
    Config(16, 1, 8),
    Config(64, 1, 6),
    Config(64, 2, 5),
]
WGMMA_SPLIT = [  # a cluster for each item, and lists of items of one and three warpgroups
    *(Config(16, 1, 4, 1, 8), Config(48, 1, 4, 1, 2), Config(112, 1, 4, 2, 2)),
    *(Config(112, 1, 4, 3, 3), Config(128, 1, 4, 3, 1), Config(128, 1, 4, 3, 5)),
    *(Config(48, 1, 4, 3), Config(128, 1, 4, 3), Config(112, 2, 4, 3), Config(80, 2, 4, 1)),
]
WGMMA_TALL = [  # tiles as high as some number of tokens needs
    *(Config(144, 1, 8, 3, 1), Config(160, 1, 8, 3, 1), Config(176, 1, 8, 3, 1)),
    *(Config(144, 2, 4, 3), Config(160, 1, 4, 3), Config(176, 1, 4, 3), Config(192, 1, 4)),
    *(Config(208, 1, 4), Config(224, 1, 4), Config(240, 2, 4)),
    *(Config(136, 1, 8, 3, 1), Config(152, 1, 8, 3, 1), Config(192, 1, 8, 3, 1)),
    *(Config(168, 1, 4), Config(136, 1, 4, 3), Config(216, 1, 4), Config(248, 1, 4)),
]
WGMMA_CONFIGS += [*WGMMA_SPLIT, *WGMMA_TALL]


def call_of(w: Spense, m: int, activation: str | None = None) -> SpenseCall:
    return SpenseCall(m, w.shape, w.sparse_shape, w.dtype, activation)


def example(shape: Shape, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Spense]:
    """Return X and packed W of small integers, whose products every dtype sums exactly."""
    m, n, k, fraction, split = shape
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randint(-3, 4, size, generator=generator, device=device).float()

    dense = drawn(n, k)
    groups = torch.rand(n, -(-k // 4), 4, generator=generator, device=device)
    two = dense.where((groups.argsort(-1) < 2).flatten(1)[:, :k], 0)
    last = int((n if split == "rows" else k) * (1 - fraction))
    if split == "rows":
        two[last:] = dense[last:]
    else:
        two[:, last:] = dense[:, last:]
    packed = Spense.from_dense((two + 0.0).to(dtype), dense_fraction=fraction, split=split)
    return drawn(m, k).to(dtype), packed


LARGE = [
    (300, 1536, 1280, 0.5, "rows"),
    (513, 1000, 2064, 0.25, "columns"),
    (64, 12800, 640, 0.5, "rows"),
    (16, 640, 6400, 0.5, "columns"),
]


def on_gpu(shape: Shape, dtype: str) -> tuple[Tensor, Spense]:
    """Return normal deviates on the GPU, whose sums are rounded."""
    x, w = example(shape, DTYPES[dtype], "cuda")
    noise = torch.rand(w.shape, device="cuda") + 0.5
    dense = (w.to_dense().float() * noise + 0.0).to(w.dtype)
    packed = Spense.from_dense(dense, dense_fraction=shape[3], split=shape[4])
    return torch.randn(x.shape, device="cuda").to(x.dtype), packed


def assert_right(
    y: Tensor,
    x: Tensor,
    w: Spense | Slide,
    what: Any,
    features: Tensor | None = None,
    tokens: Tensor | None = None,
) -> None:
    """Compare Y with the product in fp64, and in fp8 with its scales."""
    right, wide = w.to_dense().double(), x.double()
    right = right if features is None else right * features[:, None]
    wide = wide if tokens is None else wide * tokens[:, None]
    spread = (wide.square() @ right.square().T).sqrt()
    sums = FP8 if x.itemsize == 1 else FP32
    expected = Expected(wide @ right.T, spread, y.dtype, w.shape[1], sums=sums)
    assert (reason := check(y, expected).reason) is None, f"{what}: {reason}"


def pruned(n: int, k: int, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a weight that is 2:4 in its first rows and columns, with zeros of both signs."""
    w = torch.randn(n, k)
    keep = torch.rand(n, -(-k // 4), 4).argsort(-1).flatten(1)[:, :k] % 4 < 2
    keep[rows:] = keep[:, columns:] = True
    return (w * keep / k**0.5).to(dtype)
