"""Gated feed-forward layer with few units on, relu or relu2, on Hopper: its gate in TwELL words.

    words = TwELL of X @ Wg.T            twell_gate.cu: G is not written as a matrix
    Y = (act(G) * (X @ Wu.T)) @ Wd.T     ffn_sparse.cu, in groups of eight tokens (_grouped.py)

Options: `tile` units of a token share `capacity` entries (formats/twell.py). The published layout
has 256 and 31. A tile with more entries is stored dense, so that any number of units is right. A
group of tokens with many units on is left to a dense product, as ffn_sparse.py leaves it.
"""

from sparsebench.errors import Unsupported
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.twell import _grouped
from sparsebench.kernels.twell._layer import layer_of, unsupported
from sparsebench.kernels.twell._twell_gate import Tiles


def prepare(operands: Operands, *, tile: int = 256, capacity: int = 31) -> Launch:
    """Prepare the layer with its gate in such tiles. Raises Unsupported."""
    tiles = Tiles(tile, capacity)
    if reason := tiles.unsupported():
        raise Unsupported(reason)
    return _grouped.prepare(operands, layer_of(operands), tiles)


KERNEL = Kernel("ffn", "twell", "cuda", prepare, unsupported)
