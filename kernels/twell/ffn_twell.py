"""Gated feed-forward layer with few active units, relu or relu2, on Hopper, by TwELL words.

    words = TwELL of X @ Wg.T            twell_gate.cu, which does not write G as a matrix
    Y = (act(G) * (X @ Wu.T)) @ Wd.T     ffn_sparse.cu, in groups of eight tokens (_grouped.py)

Options: `tile` units of a token share `capacity` entries (formats/twell.py), 256 and 31 in the
published layout. A tile with more entries is stored dense, so results are correct for any number of
active units. Groups of tokens with many active units go to a dense product (_remainder.py).
"""

from sparsebench.errors import Unsupported
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.twell import _grouped
from sparsebench.kernels.twell._layer import layer_of, unsupported
from sparsebench.kernels.twell._twell_gate import Tiles


def prepare(operands: Operands, *, tile: int = 256, capacity: int = 31) -> Launch:
    """Prepare the layer with its gate in tiles. Raises Unsupported."""
    tiles = Tiles(tile, capacity)
    if reason := tiles.unsupported():
        raise Unsupported(reason)
    return _grouped.prepare(operands, layer_of(operands), tiles)


KERNEL = Kernel("ffn", "twell", "cuda", prepare, unsupported)
