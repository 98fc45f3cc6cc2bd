"""2:4 weights in 4 bits by Sparse-Marlin's authors: half of the codes, and their positions.

    Y [m, n] = X [m, k] @ W.T       2 of every 4 weights of a row, in 4 bits, one scale per 128

    of 4 inputs    0 3s -s 0   ->   codes 11 7    positions 1 2, in 4 bits of metadata

3.125 bits per weight. Their packing drops a kept weight of -8, whose code is 0; this one keeps it.

    needs   the authors' library marlin_cuda (_marlin.py), compute capability 8.0 or newer; its
            README says that it is not optimised for Hopper
    dtype   fp16 with fp32 accumulation, parts of k added in fp16
    sizes   n a multiple of 256, k of 128
"""

import torch
from torch import Tensor

from sparsebench.formats.int4_two_four import Int4TwoFour
from sparsebench.kernels._kernel import Kernel, Launch, Lossy, Operands
from sparsebench_authors import _marlin

IN_LANES = 0, 4, 1, 5, 2, 6, 3, 7  # columns of scales in the order of a lane's results


def prepare(operands: Operands) -> Launch:
    w = operands.weights["w"]
    assert isinstance(w, Int4TwoFour)
    _marlin.require_groups(w.group)
    arrays = packed(w)
    tiles = _marlin.tiles_of(operands.problem["m"])
    return _marlin.prepared(operands, _marlin.SPARSE, arrays, tiles)


def packed(w: Int4TwoFour) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of the kept weights, metadata, and scales."""
    codes, positions = w.unpacked()
    scales = w.scales.t().contiguous()
    in_lanes = scales.view(-1, 8)[:, IN_LANES].view(scales.shape)
    halved = codes.flatten(1).t().contiguous()
    return _marlin.tiled(halved, four_columns=True), _metadata(positions), in_lanes


def _metadata(positions: Tensor) -> Tensor:
    """Return int16 [n, k / 16] for positions [n, k / 4, 2], as ldmatrix and mma.sp read it.

    A word has four groups. In every 64 rows and 2 words, row 8h + 4c + 2b + a and word 2t + p are
    at row 32b + 4h + 2a + p and word c; the words of a pair t follow one another, for all rows.
    """
    groups = positions[..., 0] | positions[..., 1] << 2
    shifts = 4 * torch.arange(4, device=groups.device)
    words: Tensor = (groups.unflatten(1, (-1, 4)) << shifts).sum(2).to(torch.int16)
    n, count = words.shape
    by_bit = words.view(n // 64, 8, 2, 2, 2, count // 2, 2)  # rows, h, c, b, a, t, p
    return by_bit.permute(5, 0, 3, 1, 4, 6, 2).reshape(n, count)


LOSSY = Lossy({"fp16": 0.0006}, "sums of a split k are added in 16 bits")
KERNEL = Kernel("linear", "int4_two_four", "cuda", prepare, _marlin.unsupported, lossy=LOSSY)
