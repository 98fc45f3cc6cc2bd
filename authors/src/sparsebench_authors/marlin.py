"""Dense weights in 4 bits by Marlin's authors: fp16 activations, 4-bit weights, one scale per 128.

    Y [m, n] = X [m, k] @ ((code - 8) * scale).T

Made for Ampere: the kernel loads weights by cp.async, converts them in registers and multiplies by
mma.sync. Zeros of W are stored and multiplied like other weights. The two tiles that exist for up
to 16 tokens are searched; there is one for more. On Hopper the tile of 128 x 128 ends with an
illegal instruction, because ptxas (12.8 to 13.1) loses the cache policy of its copies
(github.com/IST-DASLab/marlin, issue 44), so it is not tried there.

    needs   the authors' library marlin_cuda, which also has Sparse-Marlin (_marlin.py); compute
            capability 8.0 or newer
    dtype   fp16 with fp32 accumulation, parts of k added in fp16
    sizes   n a multiple of 256, k of 128
"""

import torch
from torch import Tensor

from sparsebench.formats.int4 import Int4
from sparsebench.kernels._common.requirements import HOPPER
from sparsebench.kernels._kernel import Kernel, Launch, Lossy, Operands
from sparsebench_authors import _marlin


def prepare(operands: Operands) -> Launch:
    w = operands.weights["w"]
    assert isinstance(w, Int4)
    _marlin.require_groups(w.group)
    arrays = _packed(w)
    tiles = _marlin.tiles_of(operands.problem["m"])
    if torch.cuda.get_device_capability(operands.device) == HOPPER:
        tiles = tiles[-1:]
    return _marlin.prepared(operands, _marlin.DENSE, arrays, tiles)


def _packed(w: Int4) -> tuple[Tensor, Tensor]:
    """Return the codes, and the scales in the order of 8 x 8 transposed columns."""
    scales = w.scales.t().contiguous()
    in_order = scales.view(-1, 8, 8).transpose(1, 2).reshape(scales.shape)
    return _marlin.tiled(w.unpacked().t(), four_columns=False), in_order


LOSSY = Lossy({"fp16": 0.0006}, "sums of a split k are added in 16 bits")
KERNEL = Kernel("linear", "int4", "cuda", prepare, _marlin.unsupported, lossy=LOSSY)
